"""A layer's weights are gathered over three dims of a torus, in programs for a TPU v5p:4x4x4."""

from typing import Any

import pytest

from tests.support.topology import run_on_topology
from tests.system.measured import LAYERS, collectives_of
from tests.system.tpu import DEEP_WIDTH

DEVICES = 64
MATRIX = DEEP_WIDTH * DEEP_WIDTH


def program(dropped: str | None = None) -> dict[str, Any]:
    return run_on_topology("tests.system.tpu:torus", "v5p:4x4x4", dropped=dropped)


def full_matrices(found: dict[str, Any], kind: str) -> int:
    """The collectives of a kind that result in a full matrix."""
    return sum(c.kind == kind and c.elements == MATRIX for c in collectives_of(found))


@pytest.mark.sampled
def test_each_pass_gathers_a_layer_in_two_steps():
    gathers = [c for c in collectives_of(program()) if c.kind == "all-gather"]
    assert [c.elements for c in gathers if c.elements >= MATRIX // DEVICES] == [
        MATRIX // 16,
        MATRIX,
    ] * 2


# Sizes of axes, the outermost first, and the axes of each gather.
MESHES: list[tuple[dict[str, int], list[list[str]] | None]] = [
    ({"data": 64}, None),
    ({"data": 8, "seq": 8}, [["seq"], ["data"]]),
    ({"data": 16, "seq": 4}, [["seq"], ["data"]]),
    ({"data": 4, "expert": 4, "seq": 4}, [["seq"], ["data", "expert"]]),
    ({"data": 2, "expert": 32}, [["expert"], ["data"]]),
]


@pytest.mark.sampled
def test_shards_over_any_axes_are_gathered_without_an_all_reduce():
    meshes = [mesh for mesh, _ in MESHES]
    found = run_on_topology("tests.system.tpu:gathers", "v5p:4x4x4", meshes=meshes)
    for (mesh, steps), collectives in zip(MESHES, found, strict=True):
        assert {(kind, dtype) for kind, dtype, _ in collectives} == {("all-gather", "bf16")}, mesh
        assert steps is None or [axes for *_, axes in collectives] == steps


@pytest.mark.sampled
def test_no_loop_holds_the_shards_of_all_layers_in_bf16():
    stacks = {b["bytes"] for b in program()["largest"] if b["shape"][:1] == [LAYERS]}
    assert 4 * LAYERS * MATRIX // DEVICES in stacks
    assert 2 * LAYERS * MATRIX // DEVICES not in stacks


@pytest.mark.full
def test_in_one_step_it_is_an_all_reduce_which_takes_more_memory():
    """Of zeros with the shard in them, in fp32, besides the bf16 result.

    The peak of the program with two steps is where the gradient lies beside the weights, so that
    the difference of temp bytes is less than the fp32 array.
    """
    two, one = program(), program("unit.step")
    assert not full_matrices(one, "all-gather")
    assert full_matrices(one, "all-reduce") == full_matrices(two, "all-reduce") + 2
    matrix = {"dtype": "f32", "shape": [DEEP_WIDTH, DEEP_WIDTH]}
    assert any(matrix.items() <= buffer.items() for buffer in one["largest"])
    assert not any(matrix.items() <= buffer.items() for buffer in two["largest"])
    assert one["temp_bytes"] - two["temp_bytes"] > MATRIX
