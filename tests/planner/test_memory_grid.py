"""The estimate of a device's memory against compilers', over a grid of compiled steps."""

import functools
import gc
import time

import jax
import pytest

from jaxspeed.planner.memory import Memory, memory_in, memory_of
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.traced_step import as_on
from tests.planner.compiling import Platform, compiled, stored, target_for
from tests.planner.grid import Point, points
from tests.support.covering import covering

COMPILED: dict[Platform, dict[str, dict[str, int]]] = {"tpu": stored("tpu"), "gpu": stored("gpu")}
POINTS = {point.name: point for point in points()}
QUICK: list[tuple[Platform, str]] = [
    ("tpu", "llama: stage 0"),
    ("tpu", "llama: stage 3, 8 devices, full"),
    ("tpu", "llama: tensor 2, sequence parallel, stage 3"),
    ("tpu", "llama: host optimizer"),
    ("tpu", "llama: host optimizer and parameters, stage 3"),
    ("tpu", "gpt2: tensor 4"),
    ("tpu", "gpt2: pipe 2, stage 3"),
    ("tpu", "gpt2: budget"),
    ("tpu", "gpt2: host activations"),
    ("tpu", "mixer: stage 3"),
    ("gpu", "llama: stage 3, 8 devices, full"),
    ("gpu", "gpt2: pipe 2, stage 3"),
    ("gpu", "llama: tensor 2, stage 1"),
    ("gpu", "mixer: full"),
]
# Without those whose kind others have.
QUICKEST = [QUICK[i] for i in (0, 2, 3, 4, 5, 6, 8, 10, 12, 13)]
ALL: list[tuple[Platform, str]] = [
    (platform, name) for platform in COMPILED for name in COMPILED[platform]
]
SAMPLE = ("gpt2: every 4", "llama: pipe 4, gpipe", "mixer: stage 2")


@functools.cache
def estimate(platform: Platform, name: str) -> Memory:
    target = target_for(POINTS[name], platform)
    return memory_in(POINTS[name].step(target), target.chip)


def total(platform: Platform, name: str) -> int:
    found = COMPILED[platform][name]
    return found["argument"] + found["temp"]


def error(platform: Platform, name: str) -> float:
    return estimate(platform, name).device / total(platform, name) - 1


def test_the_grid_is_complete_and_compiled():
    assert len(POINTS) >= 60
    assert set(COMPILED["tpu"]) == set(POINTS)


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize(("platform", "name"), covering(QUICK, QUICKEST))
def test_the_device_total_is_within_a_tenth_of_the_compilers(platform, name):
    assert abs(error(platform, name)) <= 0.1


@pytest.mark.parametrize(("platform", "name"), covering(QUICK, QUICKEST))
def test_state_is_the_compilers_arguments(platform, name):
    expected = COMPILED[platform][name]["argument"]
    # Scalars and vectors of a few elements are full tiles on a TPU.
    assert estimate(platform, name).state == pytest.approx(expected, rel=0.001, abs=8192)


@pytest.mark.parametrize(("platform", "name"), covering(QUICK, QUICKEST))
def test_never_fits_where_the_compiler_needs_more(platform, name):
    assert estimate(platform, name).on(total(platform, name) - 1) != "fits"


def test_an_estimate_is_the_same_whatever_the_hashes_of_its_values_are():
    point = POINTS["llama: pipe 4, gpipe"]
    chip = target_for(point, "gpu").chip
    with as_on(chip.platform, chip.capability):
        program, batch = point.program(jax.devices(), chip.platform)
        steps = [read_step(program, batch, chip.platform) for _ in range(5)]  # traced once
    assert len({memory_in(step, chip).device for step in steps}) == 1


def test_host_memory_is_reported():
    name = "llama: host optimizer"
    expected = COMPILED["tpu"][name]["host_argument"]
    assert estimate("tpu", name).host == pytest.approx(expected, rel=0.15)


@pytest.mark.full
@pytest.mark.parametrize(("platform", "count"), {"tpu": 62, "gpu": 61}.items())
def test_as_many_of_63_are_within_a_tenth(platform, count):
    names = COMPILED[platform]
    assert len(names) == 63
    assert sum(abs(error(platform, name)) <= 0.1 for name in names) >= count


@pytest.mark.full
@pytest.mark.parametrize(("platform", "name"), ALL)
def test_all_are_within_a_fifth(platform, name):
    assert abs(error(platform, name)) <= 0.2


@pytest.mark.full
@pytest.mark.parametrize(("platform", "name"), ALL)
def test_never_fits_anywhere_in_the_grid(platform, name):
    assert estimate(platform, name).on(total(platform, name) - 1) != "fits"


@pytest.mark.full
@pytest.mark.parametrize("platform", COMPILED)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_stored_figures_are_the_compilers(platform, name):
    if platform == "gpu":
        pytest.importorskip("jax_cuda13_plugin", reason="needs jax[cuda13] (3.4 GB)")
    else:
        pytest.importorskip("libtpu", reason="needs libtpu (pip install jaxspeed[tpu])")
    point: Point = POINTS[name]
    found = compiled(point, platform)
    assert found["argument"] + found["temp"] == pytest.approx(total(platform, name), rel=0.001)


def test_an_estimate_takes_less_than_two_seconds():
    program, batch = POINTS["gpt2: stage 3"].program(jax.devices())
    gc.disable()  # a collection would go through the objects of all tests before
    try:
        start = time.process_time()
        memory_of(program, batch, "tpu")
        assert time.process_time() - start < 2
    finally:
        gc.enable()
