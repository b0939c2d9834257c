"""Plans of a step of several phases: its memory, its time, and its compiled programs."""

import functools
import importlib.util
import math
from dataclasses import replace

import jax
import pytest

import jaxspeed
from jaxspeed.engine import compiled_report
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.in_child import compile_for
from jaxspeed.planner.memory import memory_of
from jaxspeed.planner.time import time_of
from jaxspeed.planner.trace.traced_step import placed_results
from tests.objectives.anchored import Anchored
from tests.planner import jobs

V5P = target_of("v5p:2x2x2")
ADAPTERS = {
    **jobs.MLP,
    "objective": {"type": "tests.objectives.anchored:Anchored"},
    "lora": {"r": 2, "target_modules": "all-linear"},
    "data": {"source": "synthetic", "seq_len": jobs.SEQUENCE},
}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install jaxspeed[tpu])"
)


@functools.cache
def built():
    """(a step of the phases score, note (on the host) and step; a batch's shapes)."""
    return jobs.phased(jax.devices())


def per_device(tree):
    sizes = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves(tree))
    return sum(sizes)


leaves = jax.tree.leaves


def test_memory_is_the_largest_phase_beside_what_the_step_holds():
    program, batch = built()
    memory = memory_of(program, batch)
    values = program.values(batch)
    scores = 4 * program.batch.train // 8
    held = {name: per_device(value) for name, value in values.items()}
    expected = {"score": sum(held.values()), "step": sum(held.values()) + scores}
    assert {name: phase.state for name, phase in memory.phases.items()} == expected
    assert memory.device == max(phase.device for phase in memory.phases.values())
    components = {c.name: c.bytes for c in memory.components if c.lasting}
    assert components["teacher"] == held["teacher"] > 2 * components["parameters"]
    compiled = compiled_report(program, batch)
    for name, report in zip(memory.phases, compiled.programs, strict=True):
        assert report.argument_bytes + report.held_bytes == pytest.approx(expected[name], abs=64)
    assert compiled.step_bytes >= max(r.argument_bytes + r.held_bytes for r in compiled.programs)


def test_a_step_that_fits_phase_by_phase_and_not_together_does_not_fit():
    memory = memory_of(*built())
    largest = max(memory.phases.values(), key=lambda phase: phase.device)
    other = next(phase for phase in memory.phases.values() if phase is not largest)
    assert memory.on(largest.device - 1) == "does not fit" != other.on(4 * largest.device)
    uncertain = replace(other, early=10 * largest.device)
    both = replace(memory, phases={"a": largest, "b": uncertain})
    assert largest.on(4 * largest.device) == "fits" and both.on(4 * largest.device) == "tight"


def test_time_is_the_sum_of_the_programs_and_their_collectives_are_listed_by_phase():
    program, batch = built()
    time = time_of(program, batch, V5P)
    alone = time_of(replace(program, phases_of=None, frozen={}), batch, V5P)
    assert time.phases["step"] == pytest.approx(alone.step)
    assert time.step == pytest.approx(sum(time.phases.values()))
    assert time.phases["score"] > 0 and time.model_flops == alone.model_flops
    kinds = {(exchange.phase, exchange.kind) for exchange in time.exchanges}
    assert ("score", "all-gather") in kinds and ("step", "reduce-scatter") in kinds
    assert ("score", "reduce-scatter") not in kinds
    tokens = 4 * math.prod(batch["tokens"].shape)
    assert time.on_host == {"note": (tokens + 4 * program.batch.train,) * 2}
    assert "on the host, note: reads" in str(time)
    assert time.figures()["phases"] == time.phases and "phases" not in alone.figures()


def test_each_program_is_compiled_for_a_target():
    outcome = compile_for(target_of("cpu:8"), jobs.phased)
    there, here = outcome.report, compiled_report(*built())
    assert [there.phase, *there.others] == ["score", "step"] and "note" in there.on_host
    for ours, theirs in zip(there.programs, here.programs, strict=True):
        for name in ("argument_bytes", "output_bytes", "held_bytes", "flops"):
            assert getattr(ours, name) == getattr(theirs, name) > 0
    assert outcome.device_bytes == there.step_bytes > there.argument_bytes + there.temp_bytes


def test_shardings_between_programs_are_those_that_xla_chooses():
    """For absent GPUs, whose executable does not tell them."""
    program, batch = built()
    phase, values = program.phases[0], program.values(batch)
    traced = phase.trace(values)
    expected = traced.lower().compile().output_shardings
    for name, x in placed_results(program, phase, traced, values, "cuda").items():
        assert x.sharding.is_equivalent_to(expected[name], len(x.shape))
        assert x.sharding.spec[0] == "data"


def test_the_executable_of_several_programs_is_not_saved(tmp_path):
    with pytest.raises(ConfigError, match=r"one program, and a step is several here: score, note"):
        compile_for(target_of("cpu:8"), jobs.phased, keep=tmp_path / "step")


@needs_libtpu
@pytest.mark.sampled
def test_each_program_for_a_tpu_is_read_from_its_own_text():
    outcome = compile_for(target_of("v5e:2x2"), jobs.phased)
    score, step = outcome.report.programs
    gathers = [[c.bytes for c in r.collectives if c.kind == "all-gather"] for r in (score, step)]
    assert max(gathers[0]) == 4 * max(gathers[1]) > 0  # matrices of twice the width
    assert 0 < score.flops != step.flops > 0 and step.held_bytes > score.held_bytes > 0


def test_a_plan_of_an_objective_with_computed_arrays_shows_its_phases():
    plan = jaxspeed.plan(ADAPTERS, "v5p:2x2x2", compile=False)
    figures = plan.figures()
    assert list(figures["memory"]["phases"]) == ["reference", "shift", "step"]
    assert list(figures["time"]["phases"]) == ["reference", "shift", "step"]
    assert {each["phase"] for each in figures["time"]["exchanges"]} >= {"step"}
    for text in (str(plan), plan.html()):
        assert "reference" in text and "shift" in text


@pytest.mark.parametrize(("counts", "tokens"), [(None, jobs.SEQUENCE), (7, 7)])
def test_tokens_are_counted_as_the_objective_counts_them(counts, tokens, monkeypatch):
    monkeypatch.setattr(Anchored, "tokens", lambda self, sample: counts)
    time = jaxspeed.plan(ADAPTERS, "v5p:2x2x2", compile=False).figures()["time"]
    samples = 8 * ADAPTERS["train_micro_batch_size_per_gpu"]
    assert (time["unit"], time["tokens"]) == ("tokens", samples * tokens)
    assert "per sample" in time["formula"]
