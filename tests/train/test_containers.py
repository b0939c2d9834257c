"""Arrays that an nnx module keeps in lists, dicts and tuples, and Variables with metadata."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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


class Tables(nnx.Module):
    """Tables without a Variable in each kind of container, parameters and state in others."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.listed = nnx.data([jnp.arange(WIDTH) / WIDTH, jnp.ones((WIDTH, 2)) / WIDTH])
        more = jnp.ones(1), np.full(2, 0.5)
        self.named = nnx.data({"scale": jnp.full(WIDTH, 0.5), "more": more})
        self.mixed = nnx.data((jnp.ones(3) / 3, {"bias": nnx.Param(jnp.zeros(WIDTH))}))
        self.seen = nnx.List([nnx.Variable(jnp.zeros(())), nnx.Linear(WIDTH, 1, rngs=rngs)])

    def __call__(self, x):
        self.seen[0][...] = self.seen[0][...] + x.mean()
        h = jnp.tanh(self.linear(x) * self.listed[0] + self.mixed[1]["bias"][...])
        h = h * self.named["scale"] * self.named["more"][0] + self.listed[1].sum()
        return self.seen[1](h)[:, 0] * self.mixed[0].sum() * self.named["more"][1].sum()


class Normalized(nnx.Module):
    """Flax's own layer with a dict of arrays."""

    def __init__(self, rngs):
        self.inner = nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.inner(x)))[:, 0]


class Described(nnx.Module):
    """Variables whose metadata has the names of an array's own attributes."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH), dtype=jnp.bfloat16, shape="a row")
        self.seen = nnx.Variable(jnp.zeros(()), dtype=jnp.int32)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        self.seen[...] = self.seen[...] + x.mean()
        return self.head(jnp.tanh(x * self.scale))[:, 0]


@settings(SHARDED)
@pytest.mark.parametrize("model", [Tables, Normalized, Described])
def test_arrays_in_containers_are_state_as_for_plain_flax(model, setting):
    plain = train_nnx(model, loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(model, loss, batches(), SGD, setting), plain)
