"""What plans say of mixtures of experts: exchanges, FLOPs and the assumption of one round."""

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.config import Config
from jaxspeed.hardware.targets import target_of
from jaxspeed.jaxpr.primitives import GROUPED_PRODUCTS
from jaxspeed.planner.memory import memory_in
from jaxspeed.planner.search_run import Job, cost_model, search_problem
from jaxspeed.planner.time import time_in
from jaxspeed.planner.time.infer_collectives import infer_collectives
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.materialization import ScopeAnalysis
from jaxspeed.planner.trace.op_cost import device_flops, works
from jaxspeed.planner.trace.trace_ir import Scope, all_ops
from jaxspeed.planner.trace.traced_step import as_on
from jaxspeed.run import source_of
from jaxspeed.train.build import build_program
from jaxspeed.user_models.config_model import resolve_model

LAYERS, EMBED, INNER, EXPERTS, TOP, SEQ, MICRO = 3, 64, 96, 8, 2, 128, 2
PAIRS = MICRO * SEQ * TOP  # of token and expert, of a device
TARGETS = {"tpu": target_of("v5e:2x4"), "cuda": target_of("h100:8")}
TARGET = TARGETS["tpu"]


BATCH = {"tokens": jax.ShapeDtypeStruct((8 * MICRO, SEQ + 1), jnp.int32)}


def settings(expert: int, remat: str = "none", stage: int = 0) -> dict[str, Any]:
    return {
        "model": {
            "family": "mixtral",
            "preset": "tiny",
            "config": {
                "hidden_size": EMBED,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "intermediate_size": INNER,
                "num_experts": EXPERTS,
                "num_experts_per_tok": TOP,
                "vocab_size": 256,
            },
        },
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "mesh": {"expert": expert},
        "parallel": {"remat": remat},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


@functools.cache
def step(expert: int, remat: str = "none", stage: int = 0, platform: str = "tpu") -> Any:
    config = Config.load(settings(expert, remat, stage))
    model, loss = resolve_model(config)
    with as_on(platform, TARGETS[platform].chip.capability):
        program = build_program(config, model, loss, devices=jax.devices())
        return read_step(program, BATCH, platform)


def exchanged(found: Any) -> Counter[int]:
    """{elements of a device: runs} of the all-to-alls over the expert axis."""
    moved = infer_collectives(*found.phases)
    runs: Counter[int] = Counter()
    for one in (m.communication for m in moved):
        if one.kind == "all-to-all" and one.axes == ("expert",):
            runs[one.elements] += one.runs
    return runs


BUFFER = 4 * math.ceil(1.25 * PAIRS / 4)  # rows


# A TPU's ragged exchanges are given all rows of a device, and return those of its buffer.
@pytest.mark.default_cases("cuda-sent1-none")
@pytest.mark.parametrize(
    ("platform", "sent", "remat"),
    [("tpu", {PAIRS: 3, BUFFER: 2}, "full"), ("cuda", {BUFFER: 5}, "none")],
)
def test_rows_are_exchanged_twice_forward_and_three_times_backward(platform, sent, remat):
    runs = exchanged(step(4, remat, platform=platform))
    large = {rows * EMBED: times * LAYERS for rows, times in sent.items()}
    # The others are weights of the sum, and numbers of tokens.
    assert {elements: n for elements, n in runs.items() if elements > BUFFER} == large


def test_the_experts_flops_are_those_of_their_tokens():
    """Forward, backward twice, and over `expert` the first two products again."""
    (found,) = step(4).phases
    of_a_product = 2 * PAIRS * EMBED * INNER
    grouped = [op for op in all_ops(found.scope) if op.name in GROUPED_PRODUCTS]
    for op in grouped:
        (work,) = works(
            ScopeAnalysis(Scope([], [], [op]), found.sizes, (), 0, {}), found.sizes, TARGET.chip
        )
        assert work.flops == of_a_product
    others = sum(
        math.prod(row.leaf.shape)
        for row in found.program.table
        if "experts" not in row.leaf.names and len(row.leaf.shape) > 1
    )
    rest = device_flops(found.scope, found.mesh) - LAYERS * (9 + 2) * of_a_product
    # Attention's projections, the router and the head; and attention itself, less than them.
    assert 0.8 * 6 * others * MICRO * SEQ < rest < 2 * 6 * others * MICRO * SEQ
    (dense,) = step(1).phases
    alone = device_flops(dense.scope, dense.mesh)
    assert alone == pytest.approx(rest + LAYERS * 9 * of_a_product, rel=0.02)


@pytest.mark.sampled
def test_one_round_is_assumed_and_said():
    found = step(4, stage=3)
    memory, time = memory_in(found, TARGET.chip), time_in(found, TARGET)
    for text in (str(memory), str(time), memory.figures()["assumes"], time.figures()["assumes"]):
        assert "assumes one round" in " ".join(text.split())
        assert "1.25 times its share" in " ".join(text.split())
    alone = memory_in(step(1), TARGET.chip)
    assert "assumes" not in str(alone) and alone.figures()["assumes"] == ""


def test_the_links_of_the_expert_axis_carry_its_exchanges():
    groups = [g for g in time_in(step(4), TARGET).exchanges if g.axes == ("expert",)]
    (rows,) = (g for g in groups if g.kind == "all-to-all")
    assert rows.purpose == "activations" and rows.seconds > 0
    assert rows.runs >= 5 * LAYERS


def test_experts_gradients_are_reduced_over_the_other_data_axes():
    found = step(4, stage=3)
    moved = infer_collectives(*found.phases)
    experts = LAYERS * 3 * EXPERTS // 4 * EMBED * INNER
    scattered = sum(
        m.communication.elements * m.communication.runs
        for m in moved
        if m.communication.kind == "reduce-scatter" and m.communication.axes == ("data",)
    )
    assert scattered == experts


def test_the_searchs_costs_know_experts():
    """State by the placement tables' bytes; rows of which each token has as many as experts."""

    def found(expert: int, stage: int) -> tuple[Any, Any, float]:
        source = source_of(settings(expert, stage=stage))
        program, _ = Job(source, BATCH)(None)
        problem = search_problem(source, program, BATCH, TARGETS["cuda"])
        stored = sum(device for _, device in program.table.bytes_by_role().values())
        return problem.base, problem, stored

    cost = cost_model(found(1, 0)[1])
    for stage in (0, 1, 2):
        (alone, _, before), (sharded, _, after) = found(1, stage), found(8, stage)
        difference = cost(alone).device - cost(sharded).device
        assert difference == pytest.approx(before - after, rel=0.02, abs=1e4), stage
    assert cost.sizes.sharded == {"expert": LAYERS * 3 * EXPERTS * EMBED * INNER}
    assert cost.sizes.expert_rows == LAYERS * SEQ * TOP * EMBED * 2  # in bf16
