"""Plans of objectives that sample: the memory of rollouts, their programs, and their time."""

import functools
import importlib.util
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.engine import compiled_report
from jaxspeed.generation.decode_programs import ForwardPrograms
from jaxspeed.generation.rollout_programs import rollout_programs
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.in_child import compile_for
from jaxspeed.planner.make_plan import batch_shapes
from jaxspeed.planner.memory import memory_in, memory_of
from jaxspeed.planner.search_run import Job
from jaxspeed.planner.time import time_of
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.traced_step import on_chip
from jaxspeed.run import source_of
from tests.planner import jobs

LAYERS, KV_HEADS, HEAD_DIM, PROMPT, COMPLETION = 3, 2, 8, 32, 16
LENGTH = PROMPT + COMPLETION
GRPO = {
    "model": {
        "family": "llama",
        "config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": 64,
            "max_position_embeddings": LENGTH,
        },
    },
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "objective": {
        "type": "grpo",
        "rewards": "tests.planner.jobs:small",
        "num_generations": 2,
        "max_completion_length": COMPLETION,
    },
    "data": {"source": "synthetic", "seq_len": LENGTH},
    "run": {"seed": 1, "compilation_cache": False},
}
STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
BF16 = {"bf16": {"enabled": True}}
V5P, H100 = target_of("v5p:2x2x2"), target_of("h100:8")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install jaxspeed[tpu])"
)


def built(devices, changes=()):
    source = source_of(Config.load({**GRPO, **dict(changes)}), None, None, None, name="plan")
    program, _ = Job(source)(devices)
    return program, batch_shapes(source, program.batch.train)


def local_bytes(tree):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def components(memory):
    return {c.name: c.bytes for c in memory.components}


@pytest.mark.default_cases("changes1-8-cpu-1-1", "changes2-4-cpu-1-1", "changes4-2-cuda-2-1")
@pytest.mark.parametrize(
    ("changes", "devices", "platform", "groups", "starts"),
    [
        ({}, 2, "cpu", 1, 1),
        ({**STAGE_3, **BF16}, 8, "cpu", 1, 1),
        ({"mesh": {"tensor": 2}, **BF16}, 4, "cpu", 1, 1),
        ({"mesh": {"tensor": 2}, "train_batch_size": 128}, 2, "cpu", 1, 2),
        ({"train_batch_size": 256}, 2, "cuda", 2, 1),
    ],
)
def test_the_bytes_of_caches_are_those_of_the_formula(changes, devices, platform, groups, starts):
    program, batch = built(jax.devices()[:devices], changes)
    rollout = rollout_programs(program, batch, platform)
    tensor = program.mesh.shape["tensor"]
    rows = {"cpu": 8, "cuda": 64}[platform]  # of a group, on a data rank
    itemsize = 2 if "bf16" in changes else 4
    cache = LAYERS * 2 * KV_HEADS * HEAD_DIM * rows * LENGTH * itemsize // tensor
    assert (rollout.groups, rollout.caches - rollout.groups) == (groups, starts)
    assert rollout.cache_bytes == (groups + starts) * cache


def test_caches_of_a_rollout_are_as_many_and_as_large_as_planned(monkeypatch):
    """Of two data ranks, whose 32 completions are sampled in two rounds of a group of 16."""
    program, batch = built(jax.devices()[:2])
    planned = rollout_programs(program, batch)
    shapes = {(x.shape, x.dtype) for x in planned.programs.cache_shapes.values()}
    live = []
    decode = ForwardPrograms.decode

    def counted(self, *args):
        arrays = {id(x): x for x in jax.live_arrays() if (x.shape, x.dtype) in shapes}
        live.append(local_bytes([*arrays.values()]))
        return decode(self, *args)

    monkeypatch.setattr(ForwardPrograms, "decode", counted)
    config = {**GRPO, "objective": None}
    engine = jaxspeed.initialize(config=config, devices=jax.devices()[:2])
    prompts = np.random.default_rng(0).integers(1, 64, (16, PROMPT)).tolist()
    engine.rollout(prompts, COMPLETION, generations=2, seed=0, step=0)
    assert max(live) == planned.cache_bytes
    assert (planned.rows, planned.shape.rows) == (32, 16) and len(live) > 1


def test_parameters_are_gathered_once_where_they_fit():
    program, batch = built(jax.devices(), {**STAGE_3, **BF16}.items())
    parameters = sum(math.prod(row.leaf.shape) for row in program.table)
    with on_chip(H100.chip):
        memory = memory_of(program, batch, "cuda").phases["rollout"].phases
    for phase in memory.values():
        assert components(phase)["parameters gathered to sample"] == 2 * parameters
    small = replace(H100.chip, memory=2 * parameters)
    with on_chip(small):
        step = read_step(program, batch, "cuda")
        assert "for each token" in str(step.rollout.programs)
        by_unit = memory_in(step).phases["rollout"].phases["decode"]
    assert "parameters gathered to sample" not in components(by_unit)
    assert by_unit.state == memory["decode"].state - 2 * parameters


def test_all_caches_and_frozen_models_are_in_memory_beside_each_program():
    program, batch = built(jax.devices()[:2], {"train_batch_size": 256})
    frozen, _ = jobs.small(jax.devices()[:2])
    program = replace(program, frozen={"reference model": frozen})
    memory, rollout = memory_of(program, batch, "cuda"), rollout_programs(program, batch, "cuda")
    programs = memory.phases["rollout"].phases
    assert [*programs] == ["prefill", "decode", "refill"] and rollout.caches == 3
    for phase in programs.values():
        assert components(phase)["key-value caches"] == rollout.cache_bytes
        assert components(phase)["optimizer"] == local_bytes(program.state.opt)
        assert components(phase)["parameters"] == local_bytes(program.state.params)
    for phase in (*programs.values(), memory.phases["step"]):
        assert components(phase)["reference model"] == local_bytes(frozen.state)
    assert memory.device == max(part.device for part in memory.phases.values())


@pytest.mark.sampled
def test_what_a_rollout_has_in_memory_is_what_its_programs_read_and_do_not_read():
    program, batch = built(jax.devices(), {**STAGE_3, **BF16}.items())
    rollout = rollout_programs(program, batch)
    estimated = memory_of(program, batch).phases["rollout"].phases
    report = compiled_report(program, batch, rollout=rollout)
    for name, phase in estimated.items():
        compiled = report.others[f"rollout, {name}"]
        now = local_bytes(program.values(batch)["state"]) + rollout.cache_bytes
        now += components(phase)["parameters gathered to sample"]
        if name == "prefill":  # whose result is the caches of starts
            now -= rollout.cache_bytes // rollout.caches
        assert compiled.argument_bytes + compiled.held_bytes == pytest.approx(now, abs=20_000)
    assert report.others["rollout, decode"].alias_bytes == rollout.cache_bytes // rollout.caches


def test_a_plan_shows_rollout_and_step():
    plan = jaxspeed.plan(GRPO, "v5p:2x2x2", compile=False)
    figures, text = plan.figures(), str(plan)
    assert list(figures["memory"]["phases"]) == ["rollout", "step"] == [*figures["memory"]["parts"]]
    assert figures["memory"]["device"] == max(figures["memory"]["phases"].values())
    assert figures["rollout"]["rows"] == 32 and figures["rollout"]["length"] == LENGTH
    for part in (
        "memory per device, rollout",
        "memory per device, step",
        "of key-value caches while",
    ):
        assert part in text
    assert "32 completions in groups of 64 rows x 8 ranks x 48 tokens" in text
    time = figures["time"]["rollout"]
    passes = COMPLETION  # all completions are in one group
    assert time["seconds"] == pytest.approx(passes * time["token"] + time["prefill"])
    assert time["share"] == time["seconds"] / (time["seconds"] + figures["time"]["step"])
    assert time["tokens_per_second"] == 32 / time["token"]


def test_a_token_takes_no_less_than_reading_parameters_and_caches():
    program, batch = built(jax.devices(), BF16.items())
    time = time_of(program, batch, V5P).rollout
    rollout = rollout_programs(program, batch, "tpu")
    read = local_bytes(rollout.once.shapes.sources) + rollout.cache_bytes // rollout.caches
    assert read / V5P.chip.bandwidth < time.token
    assert time.prefill > time.token


def test_a_function_that_samples_has_no_programs_here():
    objective = {**GRPO["objective"], "rollout": "tests.planner.jobs:small"}
    program, batch = built(jax.devices(), {"objective": objective}.items())
    assert rollout_programs(program, batch) is None
    assert "rollout" not in memory_of(program, batch).phases


@pytest.mark.sampled
@pytest.mark.parametrize("target", ["cpu:8", pytest.param("v5e:2x2", marks=needs_libtpu)])
def test_programs_of_rollouts_are_compiled_for_a_target(target):
    target = target_of(target)
    outcome = compile_for(target, functools.partial(built, changes=STAGE_3))
    reports = outcome.report.others
    assert [*reports] == ["rollout, prefill", "rollout, decode", "rollout, refill"]
    program, batch = built(jax.devices()[: target.count], STAGE_3)
    with on_chip(target.chip):
        rollout = rollout_programs(program, batch, target.chip.platform)
    for report in reports.values():
        returned = report.output_bytes - report.alias_bytes
        assert report.argument_bytes + report.held_bytes + returned >= rollout.cache_bytes
    refill = reports["rollout, refill"]  # writes a row at a time, in place
    assert refill.temp_bytes < rollout.cache_bytes // rollout.caches // 4
    assert outcome.device_bytes == outcome.report.step_bytes
