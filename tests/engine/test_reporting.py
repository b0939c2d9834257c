"""What the engine logs: steps, times, memory, its state, and every step that was skipped."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.config import explain_config
from jaxspeed.engine import oom_help
from tests.engine import tiny
from tests.engine.tiny import PAIR


@pytest.fixture(autouse=True)
def information(caplog):
    caplog.set_level(logging.INFO, logger="jaxspeed")


def trained(steps=4, batch=None, **config):
    engine = tiny.engine(PAIR, **config)
    metrics = [engine.train_batch(batch or tiny.batch()) for _ in range(steps)]
    engine.wait()
    return metrics


def steps_said(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]


def test_every_nth_step_is_logged_with_its_own_numbers(caplog):
    metrics = trained(5, steps_per_print=2)
    second, fourth = steps_said(caplog)
    for line, number in ((second, 2), (fourth, 4)):
        found = metrics[number - 1]
        assert line.startswith(f"step {number}: loss {float(found['loss']):.6g}, ")
        assert f"grad_norm {float(found['grad_norm']):.6g}" in line
        assert "lr 0.05" in line


def injected(schedule):
    return optax.inject_hyperparams(optax.sgd)(schedule)


def in_a_chain(schedule):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.lion(schedule))


@pytest.mark.parametrize("made", [optax.adamw, in_a_chain, injected])
def test_a_schedule_of_optax_is_the_metric_lr(made, caplog):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)
    engine = tiny.engine(PAIR, optimizer=None, optimizer_=made(schedule), steps_per_print=4)
    metrics = [engine.train_batch(tiny.batch()) for _ in range(4)]
    engine.wait()
    expected = [float(schedule(step)) for step in range(4)]
    np.testing.assert_allclose([float(m["lr"]) for m in metrics], expected, rtol=1e-6)
    assert f"lr {expected[3]:.6g}" in steps_said(caplog)[0]


@pytest.mark.parametrize(
    "made",
    [
        lambda schedule: optax.sgd(0.1),
        lambda schedule: optax.partition(
            {"a": optax.sgd(schedule), "b": optax.adam(lambda step: 0.1)}, lambda params: "a"
        ),
    ],
    ids=["a constant", "two schedules"],
)
def test_without_one_schedule_there_is_no_lr(made):
    engine = tiny.engine(PAIR, optimizer=None, optimizer_=made(optax.linear_schedule(0, 1, 9)))
    assert "lr" not in engine.train_batch(tiny.batch())


def test_nothing_is_said_of_steps_without_steps_per_print(caplog):
    trained(3)
    assert steps_said(caplog) == []


def test_wall_clock_breakdown_waits_for_each_step_and_logs_its_median_time(caplog, monkeypatch):
    waited = []
    real = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or real(x))
    metrics = trained(3, steps_per_print=3, wall_clock_breakdown=True)
    assert [m in waited for m in metrics] == [True] * 3
    assert re.search(r", [\d.e+]+ ms per step \(median of 3\)", steps_said(caplog)[0])
    caplog.clear()
    waited.clear()
    metrics = trained(3, steps_per_print=3)
    assert not any(m in waited for m in metrics)
    assert " ms" not in steps_said(caplog)[0]


def test_the_verdict_on_wall_clock_breakdown_says_what_it_gives():
    (row,) = [r for r in explain_config({"wall_clock_breakdown": True}) if "wall" in r.key]
    assert row.verdict == "approximated"
    assert "the median time of a step" in row.sentence and "one program" in row.sentence


def test_memory_breakdown_adds_the_bytes_of_a_device(caplog):
    trained(2, steps_per_print=2, memory_breakdown=True)
    assert re.search(r"[\d.]+ [kMG]?B of live arrays on ", steps_said(caplog)[0])
    caplog.clear()
    trained(2, steps_per_print=2)
    assert "B of live" not in steps_said(caplog)[0]


def test_dump_state_logs_the_config_and_the_table(caplog):
    engine = tiny.engine(PAIR, dump_state=True)
    (said,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("config: "))
    assert "'dump_state': True" in said
    assert str(engine.placements) in said
    caplog.clear()
    tiny.engine(PAIR)
    assert not caplog.records


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_skipped_step_is_logged_counted_and_changes_nothing(caplog, value):
    engine = tiny.engine(PAIR, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    bad = tiny.batch()
    bad["x"] = bad["x"].copy()
    bad["x"][3, 1] = value
    before = {path: np.asarray(x) for path, x in engine.parameters.items()}
    first = engine.train_batch(bad)
    engine.wait()
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.startswith("step 1 skipped: its gradients are not finite (1 skipped so far, ")
    assert "engine.diagnose(batch)" in warning
    assert bool(first["skipped"]) and int(first["skipped_steps"]) == 1
    for path, x in engine.parameters.items():
        np.testing.assert_array_equal(x, before[path])
    second = engine.train_batch(tiny.batch())
    assert not bool(second["skipped"]) and int(second["skipped_steps"]) == 1
    assert float(second["loss_scale"]) == float(first["loss_scale"]) / 2


# -- out of memory ------------------------------------------------------------------------------


def exhausted(*args):
    raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.\nmore lines"
    )


@pytest.fixture
def crowded(monkeypatch):
    """An engine with AdamW in fp32 at stage 0, whose devices say how much they have."""
    monkeypatch.setattr(oom_help, "device_limit", lambda program: 4096)
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    return tiny.engine(PAIR, optimizer=adam, train_micro_batch_size_per_gpu=2)


def test_running_out_of_memory_in_a_step_is_explained_from_the_table(crowded, monkeypatch):
    monkeypatch.setitem(vars(crowded.program), "step", exhausted)
    with pytest.raises(tiny.jaxspeed.OutOfMemoryError) as told:
        crowded.train_batch(tiny.batch(16))
    text = str(told.value)
    # 200 parameters: param and grad 800 bytes each, the moments 1600, two counters 8.
    assert re.search(r"param +800 B", text)
    assert re.search(r"grad +800 B", text)
    assert re.search(r"opt +1.61 kB", text)
    assert "of 4.1 kB" in text
    assert (
        "the runtime reported: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123"
        in text
    )
    assert "more lines" not in text
    remedies = [line for line in text.splitlines() if line.startswith("  - ")]
    # Stage 3 frees 7/8 of all three, 2 all but the parameters, 1 the moments; so in that order.
    assert [r[4:] for r in remedies if "stage" in r] == [
        "zero_optimization.stage: 3 frees 2.8 kB per device",
        "zero_optimization.stage: 2 frees 2.1 kB per device",
        "zero_optimization.stage: 1 frees 1.4 kB per device",
    ]
    # The moments without the counters; parameters and gradients.
    assert {r[4:] for r in remedies if "offload" in r} == {
        "zero_optimization.offload_optimizer.device: cpu frees 1.6 kB per device",
        "zero_optimization.offload_param.device: cpu frees 1.6 kB per device",
        "zero_optimization.offload_optimizer.device: nvme, with nvme_path, frees 1.6 kB per device",
    }
    assert any("parallel.remat: full" in r for r in remedies)
    assert any("gradient_accumulation_steps: 2" in r for r in remedies)
    assert any("bf16.enabled: true" in r for r in remedies)
    assert isinstance(told.value.__cause__, jax.errors.JaxRuntimeError)


def test_running_out_of_memory_at_the_start_is_explained_too(monkeypatch):
    from jaxspeed.train.program import Program

    monkeypatch.setattr(Program, "init", property(lambda self: exhausted))
    with pytest.raises(tiny.jaxspeed.OutOfMemoryError, match="The placement table stores"):
        tiny.engine(PAIR)


def test_another_runtime_error_passes_as_it_is(crowded, monkeypatch):
    def fails(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setitem(vars(crowded.program), "step", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        crowded.train_batch(tiny.batch(16))


def test_a_hook_is_called_every_so_many_steps_with_numbers():
    made, called = tiny.engine(), []
    made.add_hook(lambda step, metrics: called.append((step, metrics)), every=3)
    losses = [float(made.train_batch(tiny.batch())["loss"]) for _ in range(7)]
    made.wait()
    assert [(step, metrics["loss"]) for step, metrics in called] == [(3, losses[2]), (6, losses[5])]
    assert all(type(x) is float for _, metrics in called for x in metrics.values())


def test_a_state_that_is_put_back_counts_on_from_its_step():
    made, called = tiny.engine(), []
    for _ in range(2):
        made.train_batch(tiny.batch())
    kept = jax.tree.map(jnp.copy, made.state)
    for _ in range(2):
        made.train_batch(tiny.batch())
    made.state = kept
    made.add_hook(lambda step, _: called.append(step))
    made.train_batch(tiny.batch())
    made.wait()
    assert called == [3]


def test_a_hook_that_is_called_never_is_refused():
    with pytest.raises(ValueError, match="every is 0"):
        tiny.engine().add_hook(print, every=0)


# -- clipping by default --------------------------------------------------------------------------


def clipping_said(caplog, scale, **config):
    settings = {k: v for k, v in tiny.config().items() if k != "gradient_clipping"} | config
    engine = tiny.jaxspeed.initialize(PAIR, tiny.squared_error, settings)
    batch = {name: scale * x for name, x in tiny.batch().items()}
    metrics = [engine.train_batch(batch) for _ in range(3)]
    engine.wait()
    lines = [r.getMessage() for r in caplog.records if "clipp" in r.getMessage()]
    return lines, metrics


def test_clipping_that_nobody_asked_for_is_said_at_the_start_and_when_it_first_happens(caplog):
    (start, first), metrics = clipping_said(caplog, scale=10.0)
    assert (
        "clipped to a global norm of 1, the default of DeepSpeed" in start and "0 for none" in start
    )
    norm, clipped = (float(metrics[0][name]) for name in ("grad_norm", "grad_norm_clipped"))
    assert norm > 1 and clipped == pytest.approx(1, rel=1e-5)
    assert first.startswith(f"step 1: the gradient norm {norm:.4g} was clipped to {clipped:.4g}")


def test_gradients_below_the_norm_are_not_said_to_be_clipped(caplog):
    (start,), metrics = clipping_said(caplog, scale=1e-2)
    assert float(metrics[0]["grad_norm"]) < 1
    assert "clipped to a global norm of 1" in start


@pytest.mark.parametrize("norm", [0.0, 1.0, 0.5])
def test_clipping_that_the_config_asks_for_is_not_said(caplog, norm):
    assert clipping_said(caplog, scale=10.0, gradient_clipping=norm)[0] == []
