"""A pipeline's report, made before anything is compiled, agrees with the compiled step."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.communication import Communication, ring_bytes
from jaxspeed.config import load_config
from jaxspeed.engine import compiled_report
from jaxspeed.objective.config_model import resolve_model
from jaxspeed.pipeline import PipelineReport, schedule
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program

# 4 stages of 5 layers, 4 micro-batches of 2 samples a data rank.
HIDDEN, SEQ, SAMPLES, STAGES, DATA, MICRO = 16, 8, 2, 4, 2, 4
MESSAGE = SAMPLES * SEQ * HIDDEN * 4
TICKS = MICRO + STAGES - 1  # with a forward, and as many with a backward
LAYER = 4 * (12 * HIDDEN**2 + 13 * HIDDEN)  # GPT-2's, in fp32


def program(**sections) -> Program:
    config = load_config(
        {
            "model": {
                "family": "gpt2",
                "config": {
                    "hidden_size": HIDDEN,
                    "num_hidden_layers": 5,
                    "num_attention_heads": 2,
                    "vocab_size": 64,
                    "max_position_embeddings": SEQ,
                },
            },
            "mesh": {"pipe": STAGES, "data": DATA},
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICRO,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            **sections,
        }
    )
    return build_program(config, *resolve_model(config))


def batch(samples: int = SAMPLES * DATA * MICRO):
    return {"tokens": jax.ShapeDtypeStruct((samples, SEQ + 1), np.int32)}


def told(**sections) -> PipelineReport:
    made = program(**sections)
    report = made.pipeline_report(batch(made.batch.train))
    assert report is not None
    return report


@cache
def compiled():
    return compiled_report(program(), batch())


def found(kind: str, *axes: str):
    return [c for c in compiled().collectives if c.kind == kind and c.axes == axes]


# -- against the compiled step ----------------------------------------------------------------


def test_the_messages_are_the_permutes_of_the_compiled_step() -> None:
    permutes = found("collective-permute", "pipe")
    report = compiled().pipeline
    assert sum(c.runs for c in permutes) == report.messages == 2 * TICKS
    assert sum(c.runs * c.bytes for c in permutes) == report.message_bytes == 2 * TICKS * MESSAGE
    assert all(c.bytes == MESSAGE for c in permutes)


def test_embedding_and_head_exchange_what_the_report_says() -> None:
    """The rest is a maximum, a sum and a logit for each token, which all stages share.

    And on simulated devices a few numbers a tick, for which parts of it wait (`cpu_ordering.py`).
    """
    sums = [c for c in found("all-reduce", "pipe") if c.in_accumulation]
    statistics = MICRO * 3 * SAMPLES * SEQ * 4
    expected = 2 * TICKS * MESSAGE + 2 * MICRO * MESSAGE
    assert compiled().pipeline.shared_bytes == expected
    waited_for = sum(c.runs * c.bytes for c in sums) - expected - statistics
    assert 0 <= waited_for <= 4 * 4 * TICKS


def test_zero_3_gathers_each_layer_three_times_a_forward_and_a_backward_tick() -> None:
    """The backward pass gathers no biases, and what is outside of the stack is gathered too."""
    gathers = [c for c in found("all-gather", "data") if "shard_map/" in c.site]
    sent = compiled().pipeline.gatherings["tick"].sent
    rows = 2  # of a stage: 5 layers are 8 with padding
    assert sent == (DATA - 1) / DATA * 3 * TICKS * rows * LAYER
    assert 0.95 * sent < sum(map(ring_bytes, gathers)) <= sent


def test_gradients_of_the_stack_are_reduced_in_each_backward_tick() -> None:
    """XLA:CPU writes a reduce-scatter as an all-reduce, which sends twice as much.

    jax 0.10 makes one of all weights of a layer, 0.12 three: those of one loop belong together.
    """
    loops: dict[int, list[Communication]] = {}
    for one in found("all-reduce", "data"):
        loops.setdefault(one.runs, []).append(one)
    of_layers = [loop for loop in loops.values() if sum(c.bytes for c in loop) == LAYER]
    reduced = [c for loop in of_layers for c in loop]
    report = compiled().pipeline
    assert report.reduced_sent == (DATA - 1) / DATA * TICKS * 2 * LAYER
    assert sum(map(ring_bytes, reduced)) == 2 * report.reduced_sent


def test_the_compiled_report_includes_the_pipeline() -> None:
    text = str(compiled())
    for line in ("bubble", "live inputs", "messages"):
        assert f" {line} " in text
    assert " tick " in text and "micro-batch" not in text


# -- from shapes alone ------------------------------------------------------------------------


def test_there_is_none_without_stages() -> None:
    assert program(mesh={"data": 8}).pipeline_report(batch(64)) is None


def test_live_inputs_are_those_of_one_rank() -> None:
    assert told().live_bytes == min(2 * STAGES - 1, MICRO) * MESSAGE


def test_a_16_bit_model_sends_16_bit_messages() -> None:
    report = told(bf16={"enabled": True})
    assert report.forward_bytes == report.backward_bytes == MESSAGE // 2
    assert report.gathered_bytes == LAYER // 2


def test_a_sequence_sharded_over_tensor_is_sent_sharded() -> None:
    mesh = {"pipe": 2, "data": 2, "tensor": 2}
    cut = {"sequence_parallel_activations": True}
    assert told(mesh=mesh).forward_bytes == MESSAGE
    assert told(mesh=mesh, parallel=cut).forward_bytes == MESSAGE // 2


def test_a_stage_holds_its_layers_and_their_padding() -> None:
    report = told()
    assert (report.rows, report.padding, report.slowdown) == (2, 3, 8 / 5)
    assert report.weight_bytes == 2 * LAYER


def test_gathering_once_a_step_holds_all_weights_of_a_stage() -> None:
    tick, step = (told().gatherings[name] for name in ("tick", "step"))
    assert (tick.at_once, step.at_once) == (LAYER, 2 * LAYER)
    assert step.sent == (DATA - 1) / DATA * 2 * LAYER


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_zero_3_nothing_is_gathered_and_below_2_nothing_reduced_in_a_tick(stage) -> None:
    report = told(zero_optimization={"stage": stage})
    assert report.gatherings == {}
    assert (report.reduced_bytes > 0) == (stage == 2)


def test_only_alternating_chunks_change_stages() -> None:
    """Half of the weights go to the other stage, and half of the gradients back."""
    mesh, zero = {"pipe": 2, "data": 4}, {"stage": 0}
    parallel = {"pipeline_schedule": "interleaved"}
    assert told(mesh=mesh, zero_optimization=zero).moved_sent == 0
    report = told(mesh=mesh, zero_optimization=zero, parallel=parallel)
    slots = 8 * LAYER / 2  # 2 stages of 2 chunks of 2 layers, stored cut over the stages
    assert report.moved_sent == (slots + slots) / 2


# -- as arithmetic ----------------------------------------------------------------------------


@st.composite
def reports(draw: st.DrawFn) -> PipelineReport:
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    stages, turns = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if name == "interleaved" else 1
    layers = draw(st.integers(stages * chunks, 40))
    carry = [jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8), np.int32)]
    return PipelineReport(
        schedule(name, stages, stages * turns, chunks),
        tuple(carry),
        layers,
        rows=-(-layers // (stages * chunks)),
        recompute=draw(st.sampled_from(["stage", "layers", "save"])),
        gather=draw(st.sampled_from(["tick", "step"])),
        stored_over={"data": draw(st.integers(1, 4))},
        weight_bytes=1000,
        gathered_bytes=draw(st.sampled_from([0, 100])),
        reduced_bytes=draw(st.sampled_from([0, 100])),
        moved_bytes=draw(st.sampled_from([0, 100])),
    )


@given(reports())
def test_integers_are_sent_forward_and_have_no_gradient(report) -> None:
    floats = 2 * 8 * 16 * 2
    assert (report.forward_bytes, report.backward_bytes) == (floats + 2 * 8 * 4, floats)


@given(reports())
def test_a_tick_with_padding_takes_as_long_as_its_fullest_chunk(report) -> None:
    """Real layers and padding fill all chunks, and without padding each had an equal part."""
    plan = report.schedule
    assert report.layers + report.padding == report.rows * plan.stages * plan.chunks
    equal = report.layers / (plan.stages * plan.chunks)
    assert report.slowdown == pytest.approx(report.rows / equal)
    assert report.slowdown >= 1 and report.rows - 1 < equal


@given(reports())
def test_gathering_in_each_tick_sends_more_and_holds_less(report) -> None:
    if not report.gatherings:
        return
    tick, step = report.gatherings["tick"], report.gatherings["step"]
    assert tick.sent >= step.sent and tick.at_once <= step.at_once


@given(reports())
def test_its_figures_are_plain_and_it_fits_80_columns(report) -> None:
    assert json.loads(json.dumps(report.figures())) == report.figures()
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert f"bubble {report.schedule.bubble:.1%}" in text  # the chart's
    plan = report.schedule
    idle = (plan.stages - 1) / (plan.chunks * plan.micro_batches + plan.stages - 1)
    assert f"{idle:.1%} of the time is idle" in text
