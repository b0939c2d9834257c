"""Nothing of what idle stages compute reaches a number, and every message of the others does.

Messages and slots that nothing was written to are NaN here, and the results are the same to the
bit. Training differs when a message is dropped or goes the other way, and when a mask is left out.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed.pipeline import split_loss, stage_program, stage_shard_map, training
from jaxspeed.pipeline.tick_loops import StageWork
from tests.support import reference
from tests.train.cases import Case, vectors, weighted_error
from tests.train.parity import leaf_differences, plain, run

WIDTH, STEPS, MICRO = 12, 2, 4


def init(layers, key):
    *keys, last = jax.random.split(key, layers + 1)
    blocks = [{"w": jax.random.normal(k, (WIDTH, WIDTH))} for k in keys]
    head = jax.random.normal(last, (WIDTH, WIDTH)) * WIDTH**-0.5
    return {"blocks": blocks, "head": head}


@jaxspeed.unit
def block(params, x, rate):
    """It divides by the weights' norm: a layer that is padding, of zeros, is 0 / 0."""
    w = params["w"] / jnp.linalg.norm(params["w"])
    return x + rate * jnp.tanh(3 * x @ w)


def apply(params, x):
    rates = jnp.linspace(1.0, 0.5, len(params["blocks"]))
    for i, own in enumerate(params["blocks"]):
        x = block(own, x, rates[i])
    return x @ params["head"]


@functools.cache
def case_of(layers):
    made = functools.partial(init, layers)
    return Case(
        (made, apply), weighted_error, vectors, lambda: reference.PairReference(made, apply)
    )


# (layers, pipe, words): all schedules, layers that fill the stages and layers that do not.
POINTS = {
    "1f1b": (4, 4, {}),
    "1f1b, padded": (5, 4, {"pipeline_recompute": "layers"}),
    "1f1b, kept": (5, 4, {"pipeline_recompute": "save"}),
    "gpipe": (5, 4, {"pipeline_schedule": "gpipe"}),
    "gpipe, kept": (4, 2, {"pipeline_schedule": "gpipe", "pipeline_recompute": "save"}),
    "interleaved": (4, 2, {"pipeline_schedule": "interleaved"}),
    "interleaved, padded": (5, 2, {"pipeline_schedule": "interleaved"}),
}


def trained(name, stage=0):
    layers, pipe, words = POINTS[name]
    mesh = {"pipe": pipe, "data": 8 // pipe}
    return run(case_of(layers), stage, MICRO, "sgd", steps=STEPS, mesh=mesh, parallel=words)


@functools.cache
def on_one_device(name):
    layers, pipe, _ = POINTS[name]
    return plain(case_of(layers), MICRO, "sgd", steps=STEPS, ranks=8 // pipe)


def differs(name, ours=None):
    ours = trained(name) if ours is None else ours
    difference = leaf_differences(case_of(POINTS[name][0]), ours, on_one_device(name))
    return not max(difference.values()) <= 1e-3  # true of NaN too


def poison(monkeypatch):
    def blank(shape, dtype):
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else -1, dtype)

    monkeypatch.setattr(stage_shard_map, "blank", blank)


ALWAYS = ("interleaved, padded",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.full) for n in POINTS]
)
def test_what_nothing_was_written_to_changes_no_bit(name, monkeypatch):
    clean = trained(name)
    assert not differs(name, clean)
    poison(monkeypatch)
    poisoned = trained(name)
    assert clean.losses == poisoned.losses and clean.norms == poisoned.norms
    for path, x in clean.last.items():
        np.testing.assert_array_equal(poisoned.last[path], x, err_msg=path)


@pytest.mark.parametrize(
    "number, chunk, micro, embedded",
    [(0, 0, 2, True), (1, 0, 2, False), (0, 1, 2, False), (0, 0, -1, True), (1, 1, -1, True)],
)
def test_an_idle_stage_computes_on_the_embedding(number, chunk, micro, embedded):
    """A mixture would route a blank message's tokens alike, and all stages wait for its rounds."""
    work = StageWork(*map(jnp.int32, (micro, chunk, 0)))
    entered = stage_program.Stage.entered(None, number, work, [jnp.ones(3)], [jnp.zeros(3)])
    np.testing.assert_array_equal(entered[0], float(embedded))


# -- what is needed -------------------------------------------------------------------------------


class Multiplying(types.SimpleNamespace):
    """jax.numpy with a select that multiplies by 0 and 1."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def where(self, mask, a, b):
        mask = jnp.asarray(mask)
        if not jnp.issubdtype(jnp.result_type(a), jnp.inexact):
            return jnp.where(mask, a, b)
        return a * mask.astype(jnp.result_type(a)) + b * (~mask).astype(jnp.result_type(a))


@pytest.mark.full
@pytest.mark.parametrize("module", [training, stage_program, stage_shard_map])
def test_a_mask_that_multiplies_lets_the_poison_through(module, monkeypatch):
    monkeypatch.setattr(module, "jnp", Multiplying())
    assert not differs("1f1b")
    poison(monkeypatch)
    assert differs("1f1b")


@pytest.mark.full
def test_a_mask_that_multiplies_lets_padded_layers_through(monkeypatch):
    monkeypatch.setattr(split_loss, "jnp", Multiplying())
    assert differs("1f1b, padded")


@pytest.mark.full
def test_a_message_that_stays_where_it_is_is_missed(monkeypatch):
    monkeypatch.setattr(training, "send_to_stage", lambda values, stages, by: list(values))
    assert differs("1f1b")


@pytest.mark.full
@pytest.mark.parametrize("direction", [1, -1])
def test_a_message_that_goes_the_other_way_is_missed(direction, monkeypatch):
    real = training.send_to_stage
    monkeypatch.setattr(
        training,
        "send_to_stage",
        lambda values, stages, by: real(values, stages, -by if by == direction else by),
    )
    assert differs("1f1b")


@pytest.mark.full
def test_a_sum_over_all_stages_is_not_one_stages_value(monkeypatch):
    real = training.broadcast_from
    monkeypatch.setattr(
        training, "broadcast_from", lambda values, is_it: real(values, is_it | True)
    )
    assert differs("1f1b")


@pytest.mark.full
def test_idle_stages_must_not_write(monkeypatch):
    real = training.write_slot
    monkeypatch.setattr(training, "write_slot", lambda *args: real(*args[:-1], args[-1] | True))
    assert differs("1f1b")


@pytest.mark.full
def test_blocks_know_which_layer_they_are(monkeypatch):
    monkeypatch.setattr(stage_program.Stage, "first_layer", lambda self, stage, now: 0 * stage)
    assert differs("1f1b")


@pytest.mark.full
def test_micro_batches_are_weighed(monkeypatch):
    real = training.Training._head_backward

    def unweighed(self, state, micro, end):
        state, start = real(self, state, micro, end)
        return state._replace(weights=jnp.ones_like(state.weights)), start

    monkeypatch.setattr(training.Training, "_head_backward", unweighed)
    assert differs("1f1b")
