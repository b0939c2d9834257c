"""What a pipeline compiles to, on simulated devices: memory, messages, ticks and flops.

K stages with v chunks each, M micro-batches. What is expected is written out here once more, and
the compiled program is read, with the trip counts of its loops.
"""

import functools
from math import prod
from typing import Any

import jax
import pytest

from tests.support.covering import covering
from tests.system.measured import collectives_of
from tests.system.pipeline_programs import (
    EMBED,
    LAYERS,
    SEQ,
    figures,
    kept_inputs,
    pipeline_program,
    recomputed,
)

K, M = 4, 8
CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
MICRO = 2  # samples of a data rank in a micro-batch
MESSAGE = MICRO * SEQ * EMBED * 4  # bytes, in fp32


@functools.cache
def compiled(schedule: str, micro_batches: int = M) -> dict[str, Any]:
    parallel = {"pipeline_schedule": schedule}
    return figures(
        *pipeline_program(
            jax.devices(), micro=MICRO, micro_batches=micro_batches, parallel=parallel
        )
    )


# -- memory ----------------------------------------------------------------------------------------


def slots(schedule: str, micro_batches: int) -> set[int]:
    return kept_inputs(compiled(schedule, micro_batches), (MICRO, SEQ, EMBED))


INTERLEAVED_IN_FULL = pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.full)]
)


@pytest.mark.sampled
@INTERLEAVED_IN_FULL
def test_a_stage_keeps_the_inputs_of_micro_batches_under_way_and_no_more(schedule):
    """v K + K - 1, however many micro-batches there are."""
    assert slots(schedule, 2 * K) == slots(schedule, 8 * K) == {CHUNKS[schedule] * K + K - 1}


@pytest.mark.sampled
@INTERLEAVED_IN_FULL
def test_memory_does_not_grow_with_the_micro_batches(schedule):
    more, many = (compiled(schedule, n * K)["temp_bytes"] for n in (2, 8))
    assert many <= 1.002 * more, "from 2 K on a stage keeps as many inputs as ever"


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_of_as_many_micro_batches_as_stages_it_keeps_all_and_needs_no_less_memory(schedule):
    assert slots(schedule, K) == {CHUNKS[schedule] * K}
    few, many = (compiled(schedule, n * K)["temp_bytes"] for n in (1, 8))
    assert many <= 1.02 * few


@pytest.mark.sampled
def test_gpipe_keeps_the_input_of_every_micro_batch():
    assert slots("gpipe", 8 * K) == {8 * K}


@pytest.mark.full
def test_gpipes_memory_grows_with_the_micro_batches():
    assert slots("gpipe", K) == {K}
    few, many = (compiled("gpipe", n * K)["temp_bytes"] for n in (1, 8))
    assert many >= few + 7 * K * MESSAGE


# -- messages and ticks ----------------------------------------------------------------------------


def test_a_steady_tick_of_1f1b_sends_one_message_each_way():
    assert compiled("1f1b")["tick_loops"] == [
        {"trips": [K - 1], "sent": [MESSAGE]},  # warm-up
        {"trips": [M], "sent": [MESSAGE, MESSAGE]},
        {"trips": [K - 1], "sent": [MESSAGE]},  # cool-down
    ]


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [
        ("1f1b", M),
        pytest.param("1f1b", 8 * K, marks=pytest.mark.sampled),
        pytest.param("gpipe", 8 * K, marks=pytest.mark.sampled),
        pytest.param("interleaved", M, marks=pytest.mark.full),
        pytest.param("gpipe", M, marks=pytest.mark.full),
        pytest.param("interleaved", 8 * K, marks=pytest.mark.full),
    ],
)
def test_the_loops_turn_as_often_as_the_schedule_has_ticks(schedule, micro_batches):
    v, units = CHUNKS[schedule], CHUNKS[schedule] * micro_batches + K - 1
    both = v * micro_batches - (v - 1) * K if schedule != "gpipe" else 0
    ticks = {1: 0, 2: 0}  # by the messages of one
    for loop in compiled(schedule, micro_batches)["tick_loops"]:
        assert set(loop["sent"]) == {MESSAGE}
        ticks[len(loop["sent"])] += prod(loop["trips"])
    assert ticks == {1: 2 * (units - both), 2: both}


@pytest.mark.parametrize("schedule", covering(CHUNKS, ["1f1b"]))
def test_what_stages_exchange_is_messages_and_what_embedding_and_head_share(schedule):
    """Of activations; a token's loss takes three numbers besides: the largest logit, a sum of
    exponentials, the label's logit."""
    found, units = compiled(schedule), CHUNKS[schedule] * M + K - 1
    inside = [c for c in collectives_of(found) if c.axes == ("pipe",) and c.in_accumulation]
    sent = sum(c.runs * c.bytes for c in inside if c.kind == "collective-permute")
    summed = sum(c.runs * c.bytes for c in inside if c.kind == "all-reduce")
    assert {c.kind for c in inside} == {"collective-permute", "all-reduce"}
    assert sent == 2 * units * MESSAGE == found["report"]["message_bytes"]
    shared, tokens = found["report"]["shared_bytes"], M * MICRO * SEQ
    assert shared == (2 * units + 2 * M) * MESSAGE
    assert shared + 3 * tokens * 4 <= summed <= 1.001 * (shared + 3 * tokens * 4)


# -- flops -----------------------------------------------------------------------------------------

POINTS = [
    (family, schedule, recompute)
    for family in ("gpt2", "llama", "vit")
    for schedule in CHUNKS
    for recompute in ("stage", "layers", "save")
]


def flops_over_ideal(
    family: str, schedule: str, recompute: str, mesh: dict[str, int], stage: int
) -> float:
    """Of the compiled step: over those of the same step on as many devices without stages, which
    makes the same again for its backward pass, times (v M + K - 1) / (v M)."""
    v, k = CHUNKS[schedule], mesh["pipe"]
    parallel = {"pipeline_schedule": schedule, "pipeline_recompute": recompute}
    samples = {"micro": k, "micro_batches": M}
    program = pipeline_program(
        jax.devices(), family, mesh=mesh, stage=stage, parallel=parallel, **samples
    )
    without = {axis: size for axis, size in mesh.items() if axis != "pipe"}
    without["data"] *= k
    with recomputed(LAYERS // (v * k), recompute):
        # Gathers and sums have no flops: no stage of ZeRO is needed.
        plain = figures(
            *pipeline_program(jax.devices(), family, mesh=without, **samples | {"micro": 1})
        )
    ideal = (v * M + k - 1) / (v * M)
    return figures(*program)["flops"] / plain["flops"] / ideal


@pytest.mark.sampled
def test_flops_are_those_of_as_many_data_ranks_and_the_bubbles():
    """Of 32 samples: two a micro-batch on two ranks, or one of four micro-batches on eight."""
    with recomputed(LAYERS // K, "stage"):
        plain = figures(*pipeline_program(jax.devices(), mesh={"data": 8}, micro_batches=4))
    assert compiled("1f1b")["flops"] / plain["flops"] / ((M + K - 1) / M) <= 1.03


@pytest.mark.full
@pytest.mark.parametrize(("family", "schedule", "recompute"), POINTS)
def test_flops_are_the_models_and_the_bubbles(family, schedule, recompute):
    mesh = {"pipe": K, "data": 2}
    assert flops_over_ideal(family, schedule, recompute, mesh, stage=0) <= 1.03


@pytest.mark.full
@pytest.mark.parametrize("schedule", CHUNKS)
def test_flops_with_data_and_tensor(schedule):
    mesh = {"pipe": 2, "data": 2, "tensor": 2}
    assert flops_over_ideal("llama", schedule, "stage", mesh, stage=3) <= 1.03
