"""The estimate of a device's memory against the TPU compiler's, over a grid of compiled steps."""

import functools
import time

import jax
import pytest

from jaxspeed.plan.memory import Memory, memory_of
from tests.plan.compiling import compiled, stored
from tests.plan.grid import Point, points

COMPILED = stored()
POINTS = {point.name: point for point in points()}
# All chunks of its logits stay alive until the end of the step, where XLA:TPU picks the targets'
# from them: it puts that off behind the transfers of parameters (libtpu 0.0.52).
MISSED = ("llama: host optimizer and parameters, stage 3",)
QUICK = (
    "llama: stage 0",
    "llama: stage 1",
    "llama: stage 3, 8 devices, full",
    "llama: tensor 2, sequence parallel, stage 3",
    "llama: dots",
    "llama: host optimizer",
    "llama: 4 micro-batches",
    "gpt2: tensor 4",
    "gpt2: pipe 2, stage 3",
    "gpt2: budget",
    "gpt2: host activations",
    "gpt2: fp32, stage 3",
    "mixer: stage 3",
    "mixer: full",
)
SAMPLE = ("gpt2: every 4", "llama: pipe 4, gpipe", "mixer: stage 2")


@functools.cache
def estimate(name: str) -> Memory:
    program, batch = POINTS[name].program(jax.devices())
    return memory_of(program, batch, "tpu")


def total(name: str) -> int:
    return COMPILED[name]["argument"] + COMPILED[name]["temp"]


def error(name: str) -> float:
    return estimate(name).device / total(name) - 1


def test_the_grid_is_whole_and_compiled():
    assert len(POINTS) >= 60
    assert set(COMPILED) == set(POINTS)


@pytest.mark.parametrize("name", QUICK)
def test_the_device_total_is_within_a_tenth_of_the_compilers(name):
    assert abs(error(name)) <= 0.1


@pytest.mark.parametrize("name", QUICK)
def test_state_is_the_compilers_arguments(name):
    assert estimate(name).state == pytest.approx(COMPILED[name]["argument"], rel=0.001)


@pytest.mark.parametrize("name", QUICK)
def test_never_fits_where_the_compiler_needs_more(name):
    assert estimate(name).on(total(name) - 1) != "fits"


def test_host_memory_is_told():
    name = "llama: host optimizer"
    assert estimate(name).host == pytest.approx(COMPILED[name]["host_argument"], rel=0.15)


@pytest.mark.full
def test_nine_in_ten_are_within_a_tenth():
    close = [name for name in POINTS if abs(error(name)) <= 0.1]
    assert len(close) >= 0.9 * len(POINTS)


@pytest.mark.full
def test_all_but_the_known_miss_are_within_a_fifth():
    assert {name for name in POINTS if abs(error(name)) > 0.2} == set(MISSED)


@pytest.mark.full
@pytest.mark.parametrize("name", POINTS)
def test_never_fits_anywhere_in_the_grid(name):
    assert estimate(name).on(total(name) - 1) != "fits"


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLE)
def test_the_stored_figures_are_the_compilers(name):
    point: Point = POINTS[name]
    found = compiled(point)
    assert found["argument"] + found["temp"] == pytest.approx(total(name), rel=0.001)


def test_an_estimate_takes_less_than_two_seconds():
    program, batch = POINTS["gpt2: stage 3"].program(jax.devices())
    start = time.process_time()
    memory_of(program, batch, "tpu")
    assert time.process_time() - start < 2
