"""Layout of meshes on a TPU slice, found without its compiler."""

import math
import re

import numpy as np
import pytest

from jaxspeed.axes import AXES
from jaxspeed.errors import PlacementError
from jaxspeed.hardware.targets import target_of
from jaxspeed.placement.mesh import resolve_sizes
from jaxspeed.planner.time.torus import layout_text, placed_on, refuse_torus, split_dims
from tests.support.topology import run_on_topology

# target, what libtpu is asked for, mesh
ASKED = [
    ("v5p:4x4x4", {}, {"tensor": 8}),
    ("v5p:4x4x4", {}, {"tensor": 4}),
    ("v5p:4x4x4", {}, {"pipe": 4, "tensor": 4}),
    ("v5p:4x4x8", {}, {"tensor": 8}),
    ("v5p:4x4x8", {}, {"pipe": 8, "tensor": 8}),
    ("v5p:2x2x2", {}, {"tensor": 8}),
    ("v4:2x2x2", {"chip_config_name": "megacore"}, {"tensor": 4}),
    ("v5e:2x4", {}, {"tensor": 4}),
    ("v5e:4x4", {}, {"tensor": 8}),
    ("v5e:4x4", {}, {"pipe": 2, "tensor": 2}),
    ("v6e:4x4", {}, {"tensor": 8}),
    ("v6e:8x8", {}, {"tensor": 4}),
    ("tpu7x:2x2x1", {}, {"tensor": 4}),
    ("tpu7x:4x4x4", {}, {"tensor": 8}),
    ("tpu7x:4x4x4", {}, {"tensor": 32}),
    ("2x v5p:2x2x2", {"num_slices": 2}, {"tensor": 4}),
    ("2x v5p:2x2x2", {"num_slices": 2}, {"replica": 2, "tensor": 2}),
    ("2x v5p:4x4x4", {"num_slices": 2}, {"tensor": 8}),
    ("2x v5e:2x4", {"num_slices": 2}, {"pipe": 2, "tensor": 4}),
    ("v6e:4x8", {}, {"pipe": 4, "data": 4, "tensor": 2}),
    ("v5p:2x2x14", {}, {"tensor": 8}),
]


def placed(written, sizes):
    """As libtpu's devices state them, with three coordinates; None if refused."""
    if refused(written, sizes) is not None:
        return None
    target = target_of(written)
    found = placed_on(target, resolve_sizes(sizes, target.count)).reshape(target.count, -1)
    return np.pad(found, ((0, 0), (0, 4 - found.shape[1]))).tolist()


def refused(written, sizes):
    target = target_of(written)
    try:
        refuse_torus(target, resolve_sizes(sizes, target.count))
    except PlacementError as error:
        return str(error)
    return None


def test_it_is_as_on_the_compiler_s_own_devices():
    asked = [(name.split()[-1], options, sizes) for name, options, sizes in ASKED]
    real = run_on_topology("tests.planner.direct:laid_out", "v5e:2x2", asked=asked)
    ours = [placed(name, sizes) for name, _, sizes in ASKED]
    assert ours == real
    assert None not in ours


@pytest.mark.parametrize(
    ("written", "sizes", "nearest"),
    [
        ("v5p:4x4x4", {"tensor": 8}, "data 4, tensor 16"),
        ("v5p:16x16x16", {"pipe": 16, "tensor": 8}, "pipe 16, data 16, tensor 16"),
        ("v6e:16x16", {"tensor": 8}, "data 16, tensor 16"),
        ("v6e:4x8", {"pipe": 4, "tensor": 2}, "pipe 4, data 8"),
    ],
)
def test_of_a_mesh_that_splits_dims_the_plan_says_so_and_names_others(written, sizes, nearest):
    target = target_of(written)
    found = resolve_sizes(sizes, target.count)
    shared = split_dims(target, found)
    assert shared and all(len(axes) > 1 for axes in shared.values())
    said = layout_text(target, found)
    assert all(f"{dim} by {' and '.join(axes)}" in said for dim, axes in shared.items())
    shown = said.partition("entire dims: ")[2].split("; ")
    assert shown[0] == nearest
    for each in shown:
        other = {axis: int(size) for axis, size in re.findall(r"(\w+) (\d+)", each)}
        assert math.prod(other.values()) == target.count
        assert "shared" not in layout_text(target, {**dict.fromkeys(AXES, 1), **other})


def test_devices_on_a_switch_hold_any_mesh():
    assert refused("h100:64", {"tensor": 8, "pipe": 4}) is None
    assert refused("cpu:6", {"tensor": 3}) is None


def test_the_axis_that_communicates_least_goes_across_slices():
    asked = {
        "replica": {"replica": 2, "data": 2, "tensor": 4},
        "pipe": {"pipe": 2, "data": 2, "tensor": 4},
        "data": {"data": 4, "tensor": 4},
    }
    found = run_on_topology(
        "tests.planner.direct:slices_along", "v5e:2x2", name="v5p:2x2x2", asked=list(asked.values())
    )
    for over, spread in zip(asked, found, strict=True):
        assert {axis for axis, slices in spread.items() if slices == 2} == {over}
