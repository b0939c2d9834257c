"""The time of a step: its parts, and its report."""

import functools
import gc
import json
import time as clock

import jax
import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.time import time_in, time_of
from jaxspeed.planner.trace import read_step
from tests.planner.grid import GPT2, points

POINTS = {point.name: point for point in points()}


@functools.cache
def step(name, platform="tpu"):
    return read_step(*POINTS[name].program(jax.devices()), platform)


def time(name):
    return time_in(step(name), target_of(POINTS[name].target))


def test_the_parts_sum_to_the_step():
    found = time("gpt2: pipe 2, stage 3")
    assert found.bubble > 0
    parts = found.compute + found.memory + found.exchanged + found.bubble
    assert found.step == pytest.approx(parts)
    for each in found.exchanges:
        assert 0 <= each.exposed <= each.seconds * 1.001


def test_no_step_is_faster_than_its_matmuls():
    """A forward and a backward pass of PaLM's flops, at what the chip reaches."""
    found = time("gpt2: stage 0")
    reached = found.peak * target_of("v5p:2x2x1").chip.reached["products"]
    products = found.model_flops / found.devices / reached
    assert products * 0.9 < found.compute < found.step


def test_mfu_is_six_times_the_parameters_and_the_attention():
    found = time("gpt2: stage 0")
    layers, width, tokens = 12, GPT2["hidden_size"], 4 * 8 * 1024
    matrices = 12 * layers * width**2 + GPT2["vocab_size"] * width
    flops = tokens * (6 * matrices + 12 * layers * width * 1024)
    assert found.tokens == tokens
    assert found.model_flops == pytest.approx(flops, rel=0.01)
    assert found.mfu == pytest.approx(flops / (found.step * 4 * 459e12), rel=0.01)


def test_offloaded_activations_are_fetched_a_layer_ahead_on_several_tpus():
    """As XLA:TPU compiles it; other compilers fetch them in the layer that reads them."""

    def exposed(found):
        of = [e for e in found.exchanges if e.purpose == "activations" and e.link == "host"]
        return {e.kind: e.exposed / e.seconds for e in of}

    name = "gpt2: host activations"
    ahead = exposed(time(name))
    waits = exposed(time_in(step(name, "cuda"), target_of("h100:4")))
    assert ahead["from host"] == 0 and waits["from host"] > 0.5


def test_recompute_takes_a_third_more_flops():
    saved, recomputed = time("gpt2: fp32").compute, time("gpt2: full").compute
    assert 1.2 < recomputed / saved < 1.45
    assert time("gpt2: full").model_flops == pytest.approx(time("gpt2: fp32").model_flops)


def test_the_bubble_is_the_schedules():
    built, _ = POINTS["gpt2: pipe 2"].program(jax.devices())
    bubble = built.pipeline.schedule(built.batch.accumulation).bubble
    found = time("gpt2: pipe 2")
    assert found.bubble / found.step == pytest.approx(bubble, rel=0.15)


def test_offloaded_state_is_transferred_each_step():
    """Masters and two moments in fp32, sharded over four ranks, in both directions."""
    found = time("gpt2: host optimizer")
    size = sum(x.size for x in jax.tree.leaves(step("gpt2: host optimizer").program.state.master))
    for kind in ("from host", "to host"):
        sent = sum(e.bytes for e in found.exchanges if e.kind == kind)
        assert sent == pytest.approx(12 * size / 4, rel=0.02)


def test_hours_are_tokens_over_the_rate():
    found = time("gpt2: stage 0")
    hours = found.device_hours(1e12)
    assert hours == pytest.approx(1e12 / found.tokens * found.step * found.devices / 3600)


def test_it_prints_within_80_columns_and_as_json():
    found = time("gpt2: tensor 4")
    assert max(map(len, str(found).splitlines())) <= 80
    figures = json.loads(json.dumps(found.figures()))
    assert figures["mfu"] == found.mfu
    assert len(figures["exchanges"]) == len(found.exchanges)


def test_a_model_without_tokens_is_reported_by_samples():
    found = time("mixer: stage 1")
    assert (found.unit, found.tokens) == ("samples", 32)
    assert 0 < found.mfu < 1


def test_memory_and_time_of_one_trace_take_less_than_two_seconds():
    built, batch = POINTS["gpt2: stage 3"].program(jax.devices())
    gc.freeze()  # what earlier tests left is not walked at this one's expense
    try:
        start = clock.process_time()
        time_of(built, batch, target_of("v5p:2x2x1"))
        assert clock.process_time() - start < 2
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("written", ["", "0", "many", "1Q", "-3B"])
def test_a_number_of_tokens_that_is_none(written):
    from jaxspeed.cli.plan import tokens_of

    with pytest.raises(ConfigError, match="tokens"):
        tokens_of(written)


def test_tokens_are_read_as_people_write_them():
    from jaxspeed.cli.plan import tokens_of

    assert tokens_of("1.5T") == 1.5e12
    assert tokens_of("300B") == 3e11
    assert tokens_of("1e9") == 1e9
