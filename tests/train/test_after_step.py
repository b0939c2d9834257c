"""`after_step()` of a root module: called once per optimizer step, as in a loop of one's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from jaxspeed.user_models.nnx_model import NnxModel
from tests.train.flax_loop import (
    SGD,
    SHARDED,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    loss,
    settings,
    squared,
    train_jaxspeed,
    train_linen,
    train_nnx,
)

OUT = 4


def chosen(scores: jax.Array) -> jax.Array:
    """How often each column is a row's largest."""
    return jax.nn.one_hot(scores.argmax(-1), scores.shape[-1], dtype=jnp.int32).sum(0)


def moved(bias: jax.Array, counts: jax.Array) -> jax.Array:
    return bias + 0.1 * jnp.sign(counts.mean() - counts)


class State(nnx.Variable):
    pass


class Balanced(nnx.Module):
    """Counts which output is largest, and after a step makes rare ones larger."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, OUT, rngs=rngs)
        self.bias = State(jnp.zeros(OUT))
        self.counts = State(jnp.zeros(OUT, jnp.int32))
        self.steps = State(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        scores = self.up(x) + self.bias[...]
        self.counts[...] += chosen(scores)
        return scores.max(-1)

    def after_step(self):
        self.bias[...] = moved(self.bias[...], self.counts[...])
        self.counts[...] = jnp.zeros_like(self.counts[...])
        self.steps[...] += 1


class LinenBalanced(nn.Module):
    def setup(self):
        self.up = nn.Dense(OUT)
        self.bias = self.variable("counters", "bias", jnp.zeros, OUT)
        self.counts = self.variable("counters", "counts", jnp.zeros, OUT, jnp.int32)

    def __call__(self, x):
        scores = self.up(x) + self.bias.value
        if self.is_mutable_collection("counters") and not self.is_initializing():
            self.counts.value += chosen(scores)
        return scores.max(-1)

    def after_step(self):
        self.bias.value = moved(self.bias.value, self.counts.value)
        self.counts.value = jnp.zeros_like(self.counts.value)


@settings(SHARDED)
def test_nnx_ends_a_step_as_a_plain_loop_does(setting):
    ours = train_jaxspeed(Balanced, loss, batches(), SGD, setting)
    assert_alike(ours, train_nnx(Balanced, loss, batches(), SGD, setting))
    assert np.abs(ours.values["bias"]).max() > 0.05 and int(ours.values["steps"]) == 4


@pytest.mark.sampled
@settings((3, 4, 2))
def test_linen_ends_a_step_as_a_plain_loop_does(setting):
    ours = train_jaxspeed(LinenBalanced(), loss, batches(), SGD, setting)

    def plain(out, after, batch):
        return squared(out, batch)

    args = (batches(), SGD, setting, ("counters",))
    assert_alike(ours, train_linen(LinenBalanced(), plain, *args))
    assert np.abs(ours.values["counters/bias"]).max() > 0.05


def test_with_offload_and_an_average_of_the_parameters():
    setting, params = Setting(2, 2, 1), {"lr": 0.05, "momentum": 0.9}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "SGD", "params": params, "ema_decay": 0.9}
    more = {"zero_optimization": offload, "optimizer": optimizer}
    ours = train_jaxspeed(Balanced, loss, batches(), None, setting, check=False, **more)
    assert_alike(ours, train_nnx(Balanced, loss, batches(), SGD, setting))


def engine_of(model=Balanced, **more):
    setting = Setting(0, 1, 1)
    return jaxspeed.initialize(model, loss, setting.config(64, **more), optax.sgd(0.05))


def variables(engine):
    found = engine.state.variables.items()
    return {p: np.array(x) for p, x in found if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


def test_a_skipped_step_keeps_the_variables():
    engine = engine_of()
    good = batches()[0]
    engine.train_batch(good)
    before = variables(engine)
    assert before["steps"] == 1
    engine.train_batch({**good, "x": np.full_like(good["x"], np.nan)})
    assert int(engine.state.skipped) == 1
    after = variables(engine)
    assert all(np.array_equal(after[path], x) for path, x in before.items())


def test_adapters_do_not_hide_it():
    setting = Setting(0, 1, 1)
    more = {"lora": {"r": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}
    ours = train_jaxspeed(Balanced, loss, batches(), None, setting, check=True, **more)
    assert int(ours.values["steps"]) == 4


def test_check_finds_one_that_is_left_out(monkeypatch):
    engine = engine_of()
    assert engine.check(batches()[0]).ok
    monkeypatch.setattr(NnxModel, "after_step", lambda self, variables, step: {})
    report = str(engine.check(batches()[0]))
    assert "steps" in report and "counts" in report


class ReadsParameters(Balanced):
    def after_step(self):
        self.bias[...] += self.up.bias[...]


class WritesParameters(Balanced):
    def after_step(self):
        self.up.bias = nnx.Param(jnp.zeros(OUT))


class Grows(Balanced):
    def after_step(self):
        self.bias = State(jnp.zeros(OUT + 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ReadsParameters, "after_step.*in which parameters are shapes without values"),
        (WritesParameters, "changes the parameter up/bias, which the optimizer updates"),
        (Grows, r"changes the shape of bias from \(4,\) to \(5,\)"),
    ],
)
def test_what_it_may_not_do(model, message):
    with pytest.raises(ModelError, match=message):
        engine_of(model).train_batch(batches()[0])


def test_servers_refuse_it():
    server = {"data_reduction": "parameter_server", "servers": 2}

    class Only(Balanced):
        def __call__(self, x):
            return self.up(x).max(-1)

    engine = engine_of(Only, parallel=server, train_batch_size=60)
    with pytest.raises(ModelError, match="changes variables, and workers have those"):
        engine.train_batch(batches(samples=60)[0])
