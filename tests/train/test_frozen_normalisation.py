"""Modes: what the factory set stays, and normalisations of frozen parts keep their statistics."""

import logging

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from tests.train.flax_loop import (
    REPLICATED,
    SGD,
    SHARDED,
    WIDTH,
    Setting,
    assert_alike,
    loss,
    settings,
    squared,
    train_jaxspeed,
    train_linen,
    train_nnx,
)


def batches(steps=4, samples=64):
    rng = np.random.default_rng(0)
    return [
        {
            "x": (1 + 2 * rng.normal(size=(samples, WIDTH))).astype(np.float32),
            "y": rng.normal(size=samples).astype(np.float32),
        }
        for _ in range(steps)
    ]


class Trunk(nnx.Module):
    """A normalisation with parameters, one without, and dropout."""

    def __init__(self, rngs, frozen=None, deterministic=False):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=frozen, momentum=0.5, rngs=rngs)
        plain = {"use_scale": False, "use_bias": False}
        self.bare = nnx.BatchNorm(WIDTH, use_running_average=frozen, rngs=rngs, **plain)
        self.drop = nnx.Dropout(0.5, deterministic=deterministic, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.bare(self.norm(self.linear(x)))))


class Model(nnx.Module):
    def __init__(self, rngs, **trunk):
        self.trunk = Trunk(rngs, **trunk)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.trunk(x)))[:, 0]


def moved(ours):
    """The statistics that are not as they were made."""
    start = {"mean": 0.0, "var": 1.0}
    return {
        path
        for path, x in ours.values.items()
        if path.split("/")[-1] in start and not np.all(x == start[path.split("/")[-1]])
    }


@settings(SHARDED)
def test_a_mode_that_the_factory_set_stays(setting):
    """On running averages and without dropout in the trunk, in training, as the factory says."""

    def factory(rngs):
        return Model(rngs, frozen=True, deterministic=True)

    ours = train_jaxspeed(factory, loss, batches(), SGD, setting)
    plain = train_nnx(factory, loss, batches(), SGD, setting, mode=lambda module: None)
    assert_alike(ours, plain)
    assert moved(ours) == {"norm/mean", "norm/var"}


@pytest.mark.sampled
@settings(REPLICATED)
def test_so_does_what_eval_set(setting):
    def factory(rngs):
        model = Model(rngs)
        model.trunk.eval()
        return model

    ours = train_jaxspeed(factory, loss, batches(), SGD, setting)
    plain = train_nnx(factory, loss, batches(), SGD, setting, mode=lambda module: None)
    assert_alike(ours, plain)
    assert moved(ours) == {"norm/mean", "norm/var"}


def test_a_mode_that_the_factory_left_open_follows_training():
    """None in the factory: batch statistics in training, running ones in evaluation."""
    engine = jaxspeed.initialize(
        lambda rngs: Model(rngs, frozen=None, deterministic=True),
        loss,
        Setting(0, 1, 1).config(64),
        SGD,
    )
    one = batches(1)[0]
    fresh = float(engine.eval_batch(one)["loss"])
    engine.train_batch(one)
    assert float(engine.eval_batch(one)["loss"]) != fresh
    assert np.any(np.array(engine.state.variables["trunk/bare/mean"]) != 0)


@settings(SHARDED)
def test_the_statistics_of_a_frozen_trunk_stay(setting):
    """As where a user calls trunk.eval(): the factory says nothing, `trainable` does."""

    def factory(rngs):
        return Model(rngs, frozen=False, deterministic=True)

    def mode(module):
        module.train()
        module.trunk.eval()

    args = (factory, loss, batches(), SGD, setting)
    ours = train_jaxspeed(*args, trainable=["head/**", "norm/**"])
    plain = train_nnx(*args, frozen=lambda path: path.startswith("trunk"), mode=mode)
    assert_alike(ours, plain)
    assert moved(ours) == {"norm/mean", "norm/var"}


class LinenTrunk(nn.Module):
    averages: bool | None = None

    @nn.compact
    def __call__(self, x, train):
        by_call = {} if self.averages is not None else {"use_running_average": not train}
        norm = nn.BatchNorm(use_running_average=self.averages, momentum=0.5)
        bare = nn.BatchNorm(use_running_average=not train, use_scale=False, use_bias=False)
        return jnp.tanh(bare(norm(nn.Dense(WIDTH)(x), **by_call)))


class LinenModel(nn.Module):
    averages: bool | None = None

    def setup(self):
        self.trunk, self.head = LinenTrunk(self.averages), nn.Dense(1)
        self.norm = nn.BatchNorm(momentum=0.5)

    def __call__(self, x, train: bool = False):
        h = self.norm(self.trunk(x, train), use_running_average=not train)
        return self.head(h)[:, 0]


@pytest.mark.sampled
@settings(REPLICATED)
def test_a_linen_modules_own_setting_stays(setting):
    ours = train_jaxspeed(LinenModel(averages=True), loss, batches(), SGD, setting)

    def plain(out, after, batch):
        return squared(out, batch)

    assert_alike(
        ours, train_linen(LinenModel(averages=True), plain, batches(), SGD, setting, train=True)
    )
    assert {path for path in moved(ours) if "trunk/BatchNorm_0" in path} == set()


@settings(REPLICATED)
def test_the_statistics_of_a_frozen_linen_trunk_stay(setting):
    class Frozen(LinenModel):
        """What a user writes in plain Flax: the trunk is told that it is not training."""

        def __call__(self, x, train: bool = False):
            h = self.norm(self.trunk(x, False), use_running_average=not train)
            return self.head(h)[:, 0]

    def plain(out, after, batch):
        return squared(out, batch)

    ours = train_jaxspeed(
        LinenModel(), loss, batches(), SGD, setting, trainable=["head/**", "norm/**"]
    )
    frozen = train_linen(
        Frozen(),
        plain,
        batches(),
        SGD,
        setting,
        frozen=lambda path: path.startswith("trunk"),
        train=True,
    )
    assert_alike(ours, frozen)
    assert moved(ours) == {"batch_stats/norm/mean", "batch_stats/norm/var"}


# -- what is said ---------------------------------------------------------------------------------


def said(caplog, factory, trainable=None, **sections):
    caplog.set_level(logging.WARNING, logger="jaxspeed")
    one = batches(1)[0]
    config = Setting(0, 1, 1).config(64, **sections)
    jaxspeed.initialize(factory, loss, config, SGD, trainable=trainable, example_batch=one)
    return [record.getMessage() for record in caplog.records]


def test_evaluation_mode_in_training_is_logged(caplog):
    (line,) = said(caplog, lambda rngs: Model(rngs, frozen=True, deterministic=True))
    assert "set to evaluation mode stay in it during training" in line
    for module in ("trunk/norm (use_running_average)", "trunk/drop (deterministic)"):
        assert module in line


def test_frozen_statistics_are_logged(caplog):
    (line,) = said(caplog, Model, trainable="head/**")
    assert line.startswith("frozen parts normalise by their running statistics")
    assert "trunk/norm" in line and "trunk/bare" in line
    caplog.clear()
    (line,) = said(caplog, LinenModel(), trainable="head/**")
    assert "trunk/BatchNorm_0" in line and "trunk/BatchNorm_1" in line


def test_a_batch_norm_that_leaves_bf16_is_logged(caplog):
    (line,) = said(caplog, Model, bf16={"enabled": True})
    assert (
        "promotes its output (and all that follows) to float32" in line
        and "dtype=jnp.bfloat16" in line
    )
    caplog.clear()
    assert said(caplog, Model) == []


def test_with_the_dtype_that_the_log_names_it_stays_in_bf16():
    norm = nnx.BatchNorm(WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert norm(jnp.ones((4, WIDTH), jnp.bfloat16)).dtype == jnp.bfloat16
    norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    assert norm(jnp.ones((4, WIDTH), jnp.bfloat16)).dtype == jnp.float32
