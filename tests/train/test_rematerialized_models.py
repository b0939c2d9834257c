"""Rematerialization and host memory for models as people write them, against plain Flax loops."""

import logging

import flax.linen as nn
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspeed.remat.resolve import _note_count
from tests.support.covering import covering
from tests.train.flax_loop import (
    REPLICATED,
    SGD,
    SHARDED,
    STAGE_1,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    loss,
    squared,
    train_jaxspeed,
    train_linen,
    train_nnx,
)


class Block(nnx.Module):
    """Activations have two dims, [batch, features]: a sum over samples is one over dim 0."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x)))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = LinenBlock()(x)
        return nn.Dense(1)(x)[:, 0]


class Single(nnx.Module):
    """Nothing repeats."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.up(x)))[:, 0]


class LinenSingle(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))[:, 0]


def mixed(x):
    """Two Fourier transforms, of reals and back, and of complex numbers."""
    spectrum = jnp.fft.rfft(x, axis=-1)
    return jnp.fft.irfft(-0.5 * spectrum, n=WIDTH, axis=-1) + 0.1 * jnp.fft.fft(x).real


class FourierNnx(Block):
    def __call__(self, x):
        return super().__call__(x + mixed(x))


class Fourier(Normed):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([FourierNnx(rngs) for _ in range(4)])


class FourierBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenBlock()(x + mixed(x))


class LinenFourier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = FourierBlock()(x)
        return nn.Dense(1)(x)[:, 0]


FOURIER = {"nnx": Fourier, "linen": LinenFourier()}
NORMED = {"nnx": Normed, "linen": LinenNormed()}
SINGLE = {"nnx": Single, "linen": LinenSingle()}


def trained(models, kind, setting, **sections):
    """Check a run with these sections against the plain loop."""
    model = models[kind]
    if kind == "nnx":
        plain = train_nnx(model, loss, batches(), SGD, setting)
    else:
        plain = train_linen(
            model, lambda out, after, batch: squared(out, batch), batches(), SGD, setting
        )
    assert_alike(train_jaxspeed(model, loss, batches(), SGD, setting, **sections), plain)


def over_settings():
    """Each kind of model at each setting; by default nnx at the first, Linen at the second."""
    every = (SHARDED, REPLICATED, STAGE_1, (0, 4, 1), (3, 4, 2))
    return pytest.mark.parametrize(
        ("kind", "setting"),
        covering(
            [(kind, Setting(*s)) for kind in ("nnx", "linen") for s in every],
            [("nnx", Setting(*SHARDED)), ("linen", Setting(*REPLICATED))],
        ),
    )


@pytest.mark.sampled
@over_settings()
def test_saved_inputs_of_two_dims_are_offloaded(kind, setting):
    trained(NORMED, kind, setting, activation_checkpointing={"cpu_checkpointing": True})


@pytest.mark.default_cases("nnx-setting0")
@over_settings()
def test_the_nearest_number_of_checkpoints_is_taken(kind, setting, caplog):
    _note_count.cache_clear()
    with caplog.at_level(logging.WARNING, "jaxspeed"):
        trained(NORMED, kind, setting, activation_checkpointing={"number_checkpoints": 3})
    assert "number_checkpoints is 3, which does not divide the 4 consecutive" in caplog.text
    assert caplog.text.count("4 are used, the nearest number") == 1


@pytest.mark.default_cases("nnx-setting0")
@over_settings()
def test_a_model_in_which_nothing_repeats_is_recomputed_as_one_unit(kind, setting):
    trained(SINGLE, kind, setting, parallel={"remat": "full"})


@pytest.mark.default_cases("linen-remat")
@pytest.mark.parametrize(
    ("kind", "way"),
    covering(
        [(kind, way) for kind in ("nnx", "linen") for way in ("remat", "pipe", "both")],
        [("nnx", "pipe"), ("linen", "remat")],
    ),
)
def test_blocks_with_fourier_transforms(kind, way):
    """XLA:CPU of jax 0.10.2 refused them here (RET_CHECK)."""
    sections = {} if way == "pipe" else {"parallel": {"remat": "full"}}
    setting = Setting(*SHARDED)
    if way != "remat":
        sections["mesh"] = {"data": 4, "pipe": 2}
        setting = Setting(1, 4, 2)
    trained(FOURIER, kind, setting, **sections)
