"""What crosses devices in a step, read from programs compiled for a TPU v5e:2x4.

Volumes in elements (an all-reduce counts 2, a gather and a reduce-scatter 1), Psi parameters, GAS
micro-batches, in the schedules that are built:

| stage | in the loop, each micro-batch | once a step | in all |
|---|---|---|---|
| 0 | - | all-reduce | 2 Psi |
| 1 | - | reduce-scatter, gather | 2 Psi |
| 2 | reduce-scatter | gather | (GAS + 1) Psi |
| 3 | two gathers, reduce-scatter | - | 3 Psi GAS |

The model is four square matrices and a `shift`, which is a thousandth of one. Sizes are told in
whole matrices, which leaves out the shift and the scalars (norm, loss); `test_nothing_else_...`
bounds what is left out.
"""

from typing import Any

import jax
import pytest

from jaxspeed.communication import Communication
from tests.support.covering import covering
from tests.support.topology import run_on_topology
from tests.system.measured import LAYERS, WIDTH, collectives_of, measure, stack_program

MATRIX = WIDTH * WIDTH
FACTOR = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}


# The others are asked for by tests marked `full` alone.
COVERING = [*(f"stage {stage}, 4" for stage in range(4)), "replicas, stage 3"]


def compiled(name: str) -> dict[str, Any]:
    others = [*SCHEDULES.keys() - COVERING, "replicas, stage 2"]
    names = COVERING if name in COVERING else sorted(others)
    return run_on_topology("tests.system.tpu:volumes", "v5e:2x4", names=names)[name]


def matrices(found: dict[str, Any], in_loop: bool, axis: str = "data") -> dict[str, int]:
    """{kind: matrices that it moves in a step}, of the collectives in the loop or outside it."""
    moved: dict[str, int] = {}
    for c in large(found):
        if c.in_accumulation == in_loop and c.axes == (axis,):
            moved[c.kind] = moved.get(c.kind, 0) + c.elements // MATRIX * c.runs
    return moved


def large(found: dict[str, Any]) -> list[Communication]:
    return [c for c in collectives_of(found) if c.elements >= MATRIX / 8]


def volume(found: dict[str, Any]) -> float:
    """In units of Psi, all collectives together."""
    every = collectives_of(found)
    return sum(FACTOR[c.kind] * c.elements * c.runs for c in every) / (LAYERS * MATRIX)


ONCE = {"all-reduce": LAYERS}
SCHEDULES = {
    # name: (in the loop, once a step, volume in Psi)
    "stage 0, 1": ({}, ONCE, 2),
    "stage 0, 4": ({}, ONCE, 2),
    "stage 1, 1": ({}, {"reduce-scatter": LAYERS, "all-gather": LAYERS}, 2),
    "stage 1, 4": ({}, {"reduce-scatter": LAYERS, "all-gather": LAYERS}, 2),
    "stage 2, 1": ({}, {"reduce-scatter": LAYERS, "all-gather": LAYERS}, 2),
    "stage 2, 4": ({"reduce-scatter": 4 * LAYERS}, {"all-gather": LAYERS}, 4 + 1),
    "stage 3, 1": ({}, {"all-gather": 2 * LAYERS, "reduce-scatter": LAYERS}, 3),
    "stage 3, 4": ({"all-gather": 8 * LAYERS, "reduce-scatter": 4 * LAYERS}, {}, 3 * 4),
    # A loss that is not a (sum, weight): each micro-batch is reduced.
    "each micro-batch, stage 0": ({"all-reduce": 4 * LAYERS}, {}, 2 * 4),
    "each micro-batch, stage 1": ({"all-reduce": 4 * LAYERS}, {"all-gather": LAYERS}, 2 * 4 + 1),
}


@pytest.mark.parametrize("name", covering(SCHEDULES, COVERING[:4]))
def test_kinds_and_volumes_follow_the_schedule(name):
    in_loop, once, psi = SCHEDULES[name]
    found = compiled(name)
    assert matrices(found, in_loop=True) == in_loop
    assert matrices(found, in_loop=False) == once
    assert {c.kind for c in large(found)} == {*in_loop, *once}, "nothing else of any size"
    # The shift (all-reduced, for it is small) and the scalars are 2 (GAS + 1) thousandths.
    assert psi <= volume(found) < psi * (1 + 3 / WIDTH)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_gradient_crosses_devices_inside_the_loop_of_stages_0_and_1(stage):
    found = compiled(f"stage {stage}, 4")
    assert [c for c in collectives_of(found) if c.in_accumulation] == []


@pytest.mark.parametrize("stage", [2, 3])
def test_one_reduce_scatter_a_leaf_or_bucket_inside_the_loop_of_stages_2_and_3(stage):
    found = large(compiled(f"stage {stage}, 4"))
    scatters = [c for c in found if c.kind == "reduce-scatter"]
    assert all(c.in_accumulation and c.runs == 4 for c in scatters)
    assert sum(c.elements // MATRIX for c in scatters) == LAYERS, "each leaf once"
    assert not [c for c in found if c.kind == "all-reduce"]


def test_parameters_are_gathered_in_the_compute_dtype():
    for name in ("stage 1, 4", "stage 2, 4", "stage 3, 4"):
        gathers = [c for c in large(compiled(name)) if c.kind == "all-gather"]
        assert {c.dtype for c in gathers} == {"bf16"}, name


@pytest.mark.parametrize("stage", covering([2, 3], [3]))
def test_replicas_reduce_their_shards_and_gather_nothing(stage):
    """ZeRO's gathers stay inside `data`; over `replica` goes a shard of the gradient."""
    found = compiled(f"replicas, stage {stage}")
    inside = matrices(found, in_loop=True)
    assert inside["reduce-scatter"] == 4 * LAYERS
    crossing = [c for c in large(found) if "replica" in c.axes]
    assert {c.kind for c in crossing} == {"all-reduce"}
    assert sum(c.elements for c in crossing) // (MATRIX // 4) == LAYERS


@pytest.mark.parametrize("stage", [0, 1])
def test_on_cpu_too_the_loop_of_partial_gradients_communicates_nothing(stage):
    found = measure(*stack_program(jax.devices(), stage, accumulation=4, width=64))
    every = collectives_of(found)
    assert [c for c in every if c.in_accumulation] == []
    assert {c.kind for c in every if c.elements >= 64 * 64} >= {"all-reduce"}
    reduced = sum(c.elements for c in every if c.kind == "all-reduce")
    assert reduced // (64 * 64) == LAYERS, "each gradient once"
