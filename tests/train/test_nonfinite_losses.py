"""A loss that is not finite, with gradients that are: the step is taken, named and counted."""

import logging
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.metrics import read_records
from jaxspeed.run import train
from tests.engine import tiny
from tests.run import test_run_keys
from tests.train.flax_loop import (
    REPLICATED,
    SGD,
    SHARDED,
    STAGE_1,
    WIDTH,
    Ended,
    assert_alike,
    batches,
    settings,
    squared,
    train_linen,
    train_nnx,
)

BAD = (1, 3)  # steps with a batch that has one bad sample, counted from 0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.inner(x)))[:, 0]


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.Dense(WIDTH)(x)))[:, 0]


def hidden(batch):
    """What is added to the loss, but has no gradient."""
    return jax.lax.stop_gradient(jnp.sum(batch["hidden"]))


def loss(model, batch):
    return squared(model(batch["x"]), batch) + hidden(batch)


def of_output(out, carried, batch):
    return squared(out, batch) + hidden(batch)


def given():
    made = batches()
    for step, batch in enumerate(made):
        batch["hidden"] = np.zeros(64, np.float32)
        batch["hidden"][5] = np.nan if step in BAD else 0
    return made


def logged(caplog):
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if "loss" in text]


def ended(model, setting, hooked):
    """A run of ours, whose hooks write into `hooked`."""
    engine = jaxspeed.initialize(model, loss, setting.config(64), SGD, example_batch=given()[0])
    engine.add_hook(lambda step, numbers: hooked.append(numbers["nonfinite_losses"]))
    losses = [float(engine.train_batch(batch)["loss"]) for batch in given()]
    assert not int(engine.state.skipped)
    engine.close()
    return Ended(losses, {path: np.asarray(x) for path, x in engine.parameters.items()})


def check(ours, plain, hooked, caplog):
    assert [math.isnan(x) for x in plain.losses] == [step in BAD for step in range(4)]
    assert_alike(ours, plain)
    first, count = logged(caplog)
    assert first.startswith("step 2: the loss is nan, but the step was taken, since its gradients")
    assert "are finite; engine.diagnose(batch) names the cause" in first
    assert count == "2 steps so far were taken although their loss is not finite"
    assert hooked == [0, 1, 1, 2]


@settings(SHARDED, STAGE_1)
def test_it_is_named_once_and_counted_and_the_step_is_that_of_plain_nnx(setting, caplog):
    plain = train_nnx(Net, loss, given(), SGD, setting)
    hooked = []
    check(ended(Net, setting, hooked), plain, hooked, caplog)


@settings(REPLICATED, STAGE_1)
def test_it_is_named_once_and_counted_and_the_step_is_that_of_plain_linen(setting, caplog):
    plain = train_linen(LinenNet(), of_output, given(), SGD, setting)
    hooked = []
    check(ended(LinenNet(), setting, hooked), plain, hooked, caplog)


def engine_of(value, **config):
    def infinite(model, batch):
        total, weight = tiny.squared_error(model, batch)
        return total + jax.lax.stop_gradient(value), weight

    return tiny.engine(tiny.PAIR, infinite, **config)


def test_the_count_is_in_the_lines_of_steps_and_said_when_it_has_grown(caplog):
    caplog.set_level(logging.INFO, logger="jaxspeed")
    engine = engine_of(jnp.inf, steps_per_print=2)
    for _ in range(2):
        engine.train_batch(tiny.batch())
        engine.wait()
        engine.wait()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step 2: loss")]
    assert ", 2 losses not finite" in line
    first, count = logged(caplog)
    assert first.startswith("step 1: the loss is inf, but ")
    assert count == "2 steps so far were taken although their loss is not finite"


def test_the_cause_can_be_named():
    assert "(the loss)" in str(engine_of(jnp.nan).diagnose(tiny.batch()))


def test_a_step_that_is_skipped_is_named_as_skipped_alone(caplog):
    engine = engine_of(0.0, fp16={"enabled": True, "initial_scale_power": 8})
    bad = tiny.batch()
    bad["x"] = np.full_like(bad["x"], np.nan)
    assert not math.isfinite(engine.train_batch(bad)["loss"])
    engine.wait()
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.startswith("step 1 skipped")


def test_a_step_whose_gradients_nothing_checks_is_named_with_the_reason(caplog):
    engine = engine_of(0.0, bf16={"enabled": True, "check_grad_overflow": False})
    bad = tiny.batch()
    bad["x"] = np.full_like(bad["x"], np.nan)
    engine.train_batch(bad)
    engine.wait()
    (warning,) = logged(caplog)
    assert warning.startswith("step 1: the loss is nan") and "check_grad_overflow is off" in warning


@pytest.mark.default_cases("5")
@pytest.mark.parametrize("first_steps", [12, 5])
def test_a_run_counts_them_in_its_records_and_over_restarts(first_steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sometimes(model, batch):
        total, weight = tiny.squared_error(model, batch)
        large = jnp.abs(batch["y"]).max() > 0.97
        return total + jax.lax.stop_gradient(jnp.where(large, jnp.nan, 0.0)), weight

    for steps in (first_steps, 12):
        train(test_run_keys.config(tmp_path, steps=steps), tiny.PAIR, sometimes).close()
    records = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    bad = [r["loss"] is None or not math.isfinite(r["loss"]) for r in records]
    assert 0 < sum(bad[:5]) < sum(bad) < 12
    assert [r["nonfinite_losses"] for r in records] == np.cumsum(bad).tolist()
