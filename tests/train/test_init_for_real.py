"""Factories and initializers that need values of arrays, built for real and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import ModelError
from tests.engine import tiny
from tests.train.flax_loop import (
    SGD,
    SHARDED,
    WIDTH,
    assert_alike,
    batches,
    loss,
    settings,
    train_jaxspeed,
    train_nnx,
)


def orthogonal(key, shape, dtype=jnp.float32):
    """By NumPy, which cannot be traced."""
    square = np.asarray(jax.random.normal(key, 2 * (max(shape),)))
    return jnp.asarray(np.linalg.qr(square)[0][: shape[0], : shape[1]], dtype)


class Sized(nnx.Module):
    """Sizes are values of arrays."""

    def __init__(self, rngs):
        hidden = int(jnp.prod(jnp.asarray([2, WIDTH])))
        # No bias: before a batch norm its gradient is rounding noise.
        form = {"kernel_init": orthogonal, "use_bias": False}
        self.up = nnx.Linear(WIDTH, hidden, **form, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(hidden, 1, rngs=rngs)
        if jnp.abs(self.head.kernel[...]).max() > 100:
            raise ValueError("never")

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.up(x))))[:, 0]


@settings(SHARDED)
def test_a_factory_that_needs_values_is_built_for_real(setting, caplog):
    plain = train_nnx(Sized, loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Sized, loss, batches(), SGD, setting), plain)
    assert "built in host memory, which takes 708 B" in caplog.text


def test_it_starts_anew_in_shards_and_in_16_bits():
    engine = tiny.engine(Sized, loss, stage=3, bf16={"enabled": True})
    first = {path: np.asarray(x) for path, x in engine.parameters.items()}
    kernel = engine.state.master["up/kernel"]
    assert kernel.sharding == engine.placements.sharding(engine.placements["up/kernel"].master)
    engine.train_batch(tiny.batch())
    engine.reset()
    for path, x in engine.parameters.items():
        np.testing.assert_array_equal(x, first[path])
    engine.train_batch(tiny.batch())


def test_the_init_of_a_pair_may_need_values():
    def init(key):
        return {"w": orthogonal(key, (WIDTH, 1))}

    engine = tiny.engine((init, lambda params, x: x @ params["w"]), stage=3)
    wanted = init(jax.random.key(engine.config.run.seed))["w"]
    np.testing.assert_array_equal(engine.parameters["w"], wanted)
    engine.train_batch(tiny.batch())
    assert engine.check(tiny.batch()).ok


def test_an_error_of_the_real_construction_is_the_users():
    class Broken(Sized):
        def __init__(self, rngs):
            super().__init__(rngs)
            raise KeyError("the user's own words")

    with pytest.raises(ModelError, match=r"raised KeyError.*the user's own words"):
        tiny.engine(Broken, loss)
