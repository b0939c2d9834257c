"""Losses (sum, weight, auxiliary): the last term counts alike in each micro-batch.

The reference is a loop over micro-batches of unequal weights, of which one is 0.
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
from tests.support.covering import covering
from tests.support.reference import slice_of_each_rank

FEATURES, HIDDEN, LAYERS, SAMPLES, SEED = 4, 8, 2, 32, 3
RATE, STEPS = 0.05, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.input = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(HIDDEN, 2, rngs=rngs)

    def __call__(self, x):
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parts_of(model: Any, batch: Any) -> Any:
    """(sum, weight, auxiliary); the last mixes the samples of a micro-batch."""
    out = model(batch["x"])
    error = jnp.square(out[:, 0] - batch["y"]) * batch["weight"]
    share = jax.nn.softmax(out).mean(0)
    return error.sum(), batch["weight"].sum(), jnp.square(share).sum() + jnp.var(out[:, 1])


def loss_fn(model: Any, batch: Any) -> Any:
    total, weight, auxiliary = parts_of(model, batch)
    return total, weight, auxiliary, {"auxiliary": auxiliary, "error": total / weight}


def batches(ranks: int, accumulation: int) -> list[dict[str, np.ndarray]]:
    """Weights that differ between micro-batches; those of the last one are 0."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        number = np.arange(SAMPLES) // (SAMPLES // ranks // accumulation) % accumulation
        weight = (accumulation - 1 - number if accumulation > 1 else 1 + number).astype(np.float32)
        found.append({"x": x, "y": np.sin(x.sum(1)), "weight": weight})
    return found


def plain(ranks: int, accumulation: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, norms of the gradients and final parameters."""
    graph, params = nnx.split(Net(nnx.Rngs(SEED)), nnx.Param)
    optimizer = optax.sgd(RATE)
    state, losses, norms = optimizer.init(params), [], []

    @jax.jit
    def step(params: Any, micro: Any) -> Any:
        def loss(params: Any) -> Any:
            model = nnx.merge(graph, params)
            found = [parts_of(model, one) for one in micro]
            totals, weights, auxiliary = (sum(x) for x in zip(*found, strict=True))
            return totals / weights + auxiliary / len(micro)

        return jax.value_and_grad(loss)(params)

    for batch in batches(ranks, accumulation):
        micro = [
            {n: slice_of_each_rank(x, i, accumulation, ranks) for n, x in batch.items()}
            for i in range(accumulation)
        ]
        loss, grads = step(params, micro)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        norms.append(float(optax.global_norm(grads)))
    flat = nnx.to_flat_state(params)
    return losses, norms, {"/".join(map(str, keys)): v.get_value() for keys, v in flat}


def config(stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "run": {"seed": SEED, "compilation_cache": False},
        **more,
    }


CASES = [
    (stage, accumulation, mesh)
    for stage in range(4)
    for accumulation in (1, 4)
    for mesh in ({"data": 8}, {"data": 4, "tensor": 2}, {"data": 4, "pipe": 2})
    if accumulation > 1 or "pipe" not in mesh
]
DEFAULT = [
    (0, 4, {"data": 8}),
    (3, 1, {"data": 4, "tensor": 2}),
    (2, 4, {"data": 4, "pipe": 2}),
]


@pytest.mark.default_cases("3-1-mesh16")
@pytest.mark.parametrize(("stage", "accumulation", "mesh"), covering(CASES, DEFAULT))
def test_a_step_is_that_of_a_plain_loop(stage, accumulation, mesh):
    ranks = mesh["data"]
    losses, norms, params = plain(ranks, accumulation)
    engine = jaxspeed.initialize(
        Net, loss_fn, config(stage, accumulation, mesh=mesh), example_batch=batches(ranks, 1)[0]
    )
    given = batches(ranks, accumulation)
    reports = [engine.train_batch(batch) for batch in given]
    np.testing.assert_allclose([float(r["loss"]) for r in reports], losses, rtol=2e-6)
    np.testing.assert_allclose([float(r["grad_norm"]) for r in reports], norms, rtol=5e-6)
    for path, value in params.items():
        np.testing.assert_allclose(
            np.asarray(engine.parameters[path]), value, rtol=1e-5, atol=1e-6, err_msg=path
        )
    assert all(float(r["weight"]) == batch["weight"].sum() for r, batch in zip(reports, given))


def test_metrics_stay_averages_by_weight_and_evaluation_leaves_the_term_out():
    engine = jaxspeed.initialize(Net, loss_fn, config(0, 4, mesh={"data": 8}))
    batch = batches(8, 4)[0]
    model = Net(nnx.Rngs(SEED))
    total, weight, _ = parts_of(model, batch)
    found = engine.eval_batch(batch)
    np.testing.assert_allclose(float(found["loss"]), float(total / weight), rtol=1e-6)
    trained = engine.train_batch(batch)
    np.testing.assert_allclose(float(trained["error"]), float(total / weight), rtol=1e-6)
    assert float(trained["loss"]) > float(trained["error"]) + 0.1


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [{"data": 8}, pytest.param({"pipe": 2}, marks=pytest.mark.full)])
def test_check_agrees(mesh):
    engine = jaxspeed.initialize(
        Net, loss_fn, config(1, 4, mesh=mesh), example_batch=batches(8, 1)[0]
    )
    report = engine.check(batches(8, 4)[0])
    assert report.ok, str(report)


def of_the_model(model: Any, batch: Any) -> Any:
    total, _, auxiliary = parts_of(model, batch)
    return total, jnp.square(model(batch["x"])).sum(), auxiliary


def test_the_weight_has_to_depend_on_the_batch_alone():
    engine = jaxspeed.initialize(Net, of_the_model, config(0, 1))
    engine.train_batch(batches(8, 1)[0])  # of one micro-batch it may depend on anything
    engine = jaxspeed.initialize(Net, of_the_model, config(0, 4, mesh={"data": 8}))
    with pytest.raises(ModelError, match="the weight depends on more than the batch"):
        engine.train_batch(batches(8, 4)[0])


@pytest.mark.default_cases("parallel1", "parallel2")
@pytest.mark.parametrize(
    "parallel",
    [
        {"data_reduction": "ring"},
        {"data_reduction": "parameter_server", "servers": 4},
        {"gradient_reduction": "step"},
    ],
)
def test_who_has_only_its_own_samples_refuses_the_term(parallel):
    engine = jaxspeed.initialize(Net, loss_fn, config(0, 4, parallel=parallel))
    with pytest.raises(ModelError, match="auxiliary term, which is of an entire micro-batch"):
        engine.train_batch(batches(8, 1)[0])
