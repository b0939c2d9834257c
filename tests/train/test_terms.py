"""Losses of several terms, each averaged by its own weight over the step, and declared metrics.

The reference computes the entire batch at once, from the formula.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from jaxspeed.objectives import Max, Mean, Min, Sum, Terms
from jaxspeed.run.evaluation import Evaluated
from tests.support.covering import covering
from tests.train.test_auxiliary_losses import FEATURES, SAMPLES, SEED, STEPS, Net, config

COEFFICIENT = 0.5
RANKS = 4


def numbers(out: Any, batch: Any) -> Any:
    """The sums and weights of both terms: pairs that count, and tokens of few samples."""
    error = jnp.square(out[:, 0] - batch["y"])
    likelihood = jax.nn.softplus(out[:, 1]) * batch["tokens"]
    return (error * batch["pairs"]).sum(), batch["pairs"].sum(), likelihood.sum(), batch["tokens"]


def declared(out: Any, batch: Any) -> dict[str, Any]:
    out = out[:, 1]
    return {
        "positive": Mean(((out > 0) * batch["tokens"]).sum(), batch["tokens"].sum()),
        "seen": Sum(batch["tokens"].sum()),
        "least": Min(out.min()),
        "largest": Max(out.max()),
        "error": jnp.square(out).mean(),
    }


def loss_fn(model: Any, batch: Any) -> Any:
    out = model(batch["x"])
    error, pairs, likelihood, tokens = numbers(out, batch)
    terms = Terms(pairs=(error, pairs), likelihood=(likelihood, tokens.sum(), COEFFICIENT))
    return terms, declared(out, batch)


def batches(pairs: bool = True) -> list[dict[str, np.ndarray]]:
    """Most micro-batches of most ranks have no tokens."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        tokens = np.where(np.arange(SAMPLES) % 11 == 3, np.arange(SAMPLES), 0)
        counts = rng.integers(0, 3, SAMPLES) * pairs
        arrays = {"tokens": tokens.astype(np.float32), "pairs": counts.astype(np.float32)}
        found.append({"x": x, "y": np.sin(x.sum(1)), **arrays})
    return found


def mean(total: Any, weight: Any) -> Any:
    return total / weight if weight else 0.0 * total


def of_batch(model: Any, batch: Any) -> Any:
    error, pairs, likelihood, tokens = numbers(model(batch["x"]), batch)
    of_pairs = jnp.where(pairs > 0, error / jnp.where(pairs > 0, pairs, 1), 0)
    return of_pairs + COEFFICIENT * likelihood / tokens.sum()


def plain(steps: list[Any]) -> tuple[list[float], dict[str, Any]]:
    graph, params = nnx.split(Net(nnx.Rngs(SEED)), nnx.Param)
    optimizer = optax.sgd(0.05)
    state, losses = optimizer.init(params), []
    for batch in steps:
        loss, grads = jax.value_and_grad(lambda p, b=batch: of_batch(nnx.merge(graph, p), b))(
            params
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, {
        "/".join(map(str, keys)): v.get_value() for keys, v in nnx.to_flat_state(params)
    }


def assert_declared(found: Any, model: Any, batch: Any, count: int = SAMPLES) -> None:
    out = np.asarray(model(batch["x"][:count]))[:, 1]
    tokens = batch["tokens"][:count]
    wanted = {
        "positive": ((out > 0) * tokens).sum() / tokens.sum(),
        "seen": tokens.sum(),
        "least": out.min(),
        "largest": out.max(),
        "likelihood": (np.logaddexp(out, 0) * tokens).sum() / tokens.sum(),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(float(found[name]), value, rtol=1e-5, err_msg=name)


RING, STEP = {"data_reduction": "ring"}, {"gradient_reduction": "step"}
CASES = [
    (stage, accumulation, {"data": RANKS, **mesh}, parallel)
    for stage in range(4)
    for accumulation in (1, 4)
    for mesh, parallel in (
        ({}, {}),
        ({}, STEP),
        ({}, RING),
        ({"tensor": 2}, {}),
        ({"pipe": 2}, {}),
    )
    if (accumulation > 1 or "pipe" not in mesh)
    and not (parallel is STEP and (stage > 1 or accumulation == 1))
]
DEFAULT = [
    (1, 4, {"data": RANKS}, STEP),
    (3, 4, {"data": RANKS}, RING),
    (2, 4, {"data": RANKS, "pipe": 2}, {}),
]


@pytest.mark.default_cases("1-4-mesh12-parallel12")
@pytest.mark.parametrize(("stage", "accumulation", "mesh", "parallel"), covering(CASES, DEFAULT))
def test_a_step_is_that_of_the_formula(stage, accumulation, mesh, parallel):
    steps = batches()
    losses, params = plain(steps)
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    engine = jaxspeed.initialize(
        Net,
        loss_fn,
        config(stage, accumulation, mesh=mesh, parallel=parallel),
        example_batch=steps[0],
        devices=devices,
    )
    start = Net(nnx.Rngs(SEED))
    found = [engine.train_batch(batch) for batch in steps]
    np.testing.assert_allclose([float(r["loss"]) for r in found], losses, rtol=3e-6)
    assert_declared(found[0], start, steps[0])
    for path, value in params.items():
        ours = np.asarray(engine.parameters[path])
        np.testing.assert_allclose(ours, value, rtol=1e-5, atol=1e-6, err_msg=path)
    evaluated = engine.eval_batch(steps[0])
    np.testing.assert_allclose(
        float(evaluated["loss"]), float(of_batch(engine.module, steps[0])), rtol=1e-5
    )
    assert "totals" not in evaluated
    assert_declared(evaluated, engine.module, steps[0])


def test_a_term_without_weight_in_a_step_leaves_the_others():
    steps = batches(pairs=False)
    losses, _ = plain(steps[:1])
    engine = jaxspeed.initialize(Net, loss_fn, config(1, 4, mesh={"data": 8}))
    np.testing.assert_allclose(float(engine.train_batch(steps[0])["loss"]), losses[0], rtol=3e-6)


def test_an_evaluation_of_several_batches_is_that_of_all_samples():
    batch, found = batches()[0], Evaluated()
    engine = jaxspeed.initialize(Net, loss_fn, config(0, 1, mesh={"data": 8}))
    for start, stop in ((0, 8), (8, 32)):
        part = {name: x[start:stop] for name, x in batch.items()}
        values = jax.device_get(engine.eval_totals(part))
        totals = values.pop("totals")
        found.join(totals, 1)
        weight = float(values.pop("weight"))
        found.add({name: float(x) for name, x in values.items() if name not in totals}, weight)
    model = Net(nnx.Rngs(SEED))
    np.testing.assert_allclose(found.means["loss"], float(of_batch(model, batch)), rtol=1e-6)
    assert_declared(found.means, model, batch)


@pytest.mark.sampled
@pytest.mark.parametrize("parallel", [{}, RING])
def test_check_agrees(parallel):
    engine = jaxspeed.initialize(Net, loss_fn, config(1, 4, parallel=parallel))
    report = engine.check(batches()[0])
    assert report.ok, str(report)


def test_a_metric_that_is_declared_does_not_change_how_gradients_are_reduced(caplog):
    def mixing(model, batch):
        out = model(batch["x"])
        error, pairs, _, _ = numbers(out, batch)
        return error, pairs, {"spread": Mean(jnp.square(out - out.mean()).sum(), out.size)}

    engine = jaxspeed.initialize(Net, mixing, config(1, 4, mesh={"data": 8}))
    engine.train_batch(batches()[0])
    assert "the metric spread mixes samples" in caplog.text
    state, program = engine.state, engine.program
    shapes = program.abstract_batch(program.read_batch(batches()[0], None))
    found = []

    def reduction(*given):
        found.append(program.gradients.reduction(*given, jnp.asarray(0))[0])

    jax.eval_shape(program.in_mesh(reduction), state.variables, shapes)
    assert found == ["step"]


BAD = {
    "no term": (lambda total, weight: Terms(), "Terms without a term"),
    "one number": (lambda total, weight: Terms(a=total), "term 'a' is a"),
    "a vector": (lambda total, weight: Terms(a=(total[None], weight)), "a sum of 'a' of shape"),
    "a traced coefficient": (
        lambda total, weight: Terms(a=(total, weight, total)),
        "the coefficient of loss_fn's term 'a'",
    ),
    "a term's name twice": (
        lambda total, weight: (Terms(a=(total, weight)), {"a": total}),
        "a term and a metric of the name 'a'",
    ),
    "a weight of parameters": (
        lambda total, weight: Terms(a=(total, weight), b=(total, total)),
        "a weight of loss_fn's Terms depends on parameters",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_loss_is_refused(name):
    returned, says = BAD[name]

    def wrong(model, batch):
        return returned(*numbers(model(batch["x"]), batch)[:2])

    with pytest.raises(ModelError, match=says):
        jaxspeed.initialize(Net, wrong, config(0, 1), example_batch=batches()[0]).train_batch(
            batches()[0]
        )


def test_workers_of_a_parameter_server_refuse_several_terms():
    parallel = {"data_reduction": "parameter_server", "servers": 4}
    engine = jaxspeed.initialize(Net, loss_fn, config(0, 4, parallel=parallel))
    with pytest.raises(ModelError, match="the loss has several terms"):
        engine.train_batch(batches()[0])
