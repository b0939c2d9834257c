"""A loss (sum, weight) whose weight depends on parameters: the gradient is that of the quotient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import ModelError
from jaxspeed.traced_loss import passes
from tests.engine import tiny

RATE = 0.05  # of tiny.config's SGD


def weighted(model, batch):
    out = model(batch["x"])[:, 0]
    weights = jnp.exp(0.3 * out)
    return (weights * (out - batch["y"]) ** 2).sum(), weights.sum()


def stopped(model, batch):
    total, weight = weighted(model, batch)
    return total, jax.lax.stop_gradient(weight)


def counted(model, batch):
    """The number of samples whose output is large has no gradient."""
    error = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    is_large = error > 0.5 * jnp.mean(jax.lax.stop_gradient(error))
    return (error * is_large).sum(), is_large.sum()


def gradients(engine, batch):
    """Those of one step of SGD."""
    before = {path: np.array(x) for path, x in engine.parameters.items()}
    engine.train_batch(batch)
    return {path: (before[path] - np.array(x)) / RATE for path, x in engine.parameters.items()}


def plain_gradients(seed, batch):
    def quotient(model):
        total, weight = weighted(model, batch)
        return total / weight

    found = nnx.to_flat_state(nnx.grad(quotient)(tiny.Listed(nnx.Rngs(seed))))
    return {"/".join(map(str, path)): np.array(x[...]) for path, x in found}


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
def test_with_one_micro_batch_the_gradient_is_that_of_the_quotient(stage):
    engine = tiny.engine(loss_fn=weighted, stage=stage)
    batch = tiny.batch()
    wanted = plain_gradients(engine.config.run.seed, batch)
    assert engine.check(batch).ok
    for path, grad in gradients(engine, batch).items():
        np.testing.assert_allclose(grad, wanted[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_check_finds_a_gradient_of_the_weight_that_is_dropped(monkeypatch):
    kept = tuple(p for p in passes.BEFORE_SPLIT if p is not passes.weight_derivative)
    monkeypatch.setattr(passes, "BEFORE_SPLIT", kept)
    engine = tiny.engine(loss_fn=weighted)
    assert not engine.check(tiny.batch()).ok


SUMMED = {  # (samples, settings in which gradients of parts are added)
    "micro-batches": (16, {"gradient_accumulation_steps": 2}),
    "ring": (8, {"parallel": {"data_reduction": "ring"}}),
    "server": (7, {"parallel": {"data_reduction": "parameter_server"}}),
    "stages": (32, {"mesh": {"pipe": 2}}),
    "parts": (2, {"parallel": {"batch_parts": 2}, "train_micro_batch_size_per_gpu": 2}),
}


@pytest.mark.parametrize("name", SUMMED)
def test_where_gradients_of_parts_are_added_it_is_refused(name):
    samples, settings = SUMMED[name]
    devices = jax.devices()[:1] if name == "parts" else jax.devices()
    with pytest.raises(ModelError, match=r"weight depends on parameters that are trained \(blocks"):
        engine = tiny.engine(loss_fn=weighted, devices=devices, **settings)
        engine.train_batch(tiny.batch(samples))


def beside_its_sum(model, batch):
    """Of the same stack, and of the batch alone."""
    error = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    total, weight = jnp.stack([error, batch["y"] ** 2]).reshape(2, -1, 2).sum((1, 2))
    return total, weight


def by_a_frozen_part(model, batch):
    weights = jnp.exp(jnp.tanh(model.input(batch["x"])[:, 0]))
    return (weights * (model(batch["x"])[:, 0] - batch["y"]) ** 2).sum(), weights.sum()


@pytest.mark.parametrize(
    ("loss_fn", "trainable"),
    [
        (stopped, None),
        (counted, None),
        (beside_its_sum, None),
        (by_a_frozen_part, ["head/**", "blocks/**"]),
    ],
)
def test_a_weight_without_a_gradient_is_a_number(loss_fn, trainable):
    engine = tiny.engine(loss_fn=loss_fn, trainable=trainable, gradient_accumulation_steps=2)
    assert np.isfinite(engine.train_batch(tiny.batch(16))["loss"])
    assert engine.check(tiny.batch(16)).ok
