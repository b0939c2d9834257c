"""Meshes that split a dim of a torus: collectives of compiled steps run over the links of the plan.

Places are those of libtpu's devices; the plan has its own without libtpu.
"""

from collections import Counter
from typing import Any

import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.placement.mesh import resolve_sizes
from jaxspeed.planner.time.links import Links
from jaxspeed.planner.time.torus import DIMS, layout_of, split_dims
from tests.support.topology import run_on_topology

MESHES = [
    ("v6e:4x8", {"pipe": 4, "data": 4, "tensor": 2}),
    ("v5p:4x4x4", {"data": 8, "tensor": 8}),
    ("v6e:4x8", {"pipe": 2, "data": 8, "tensor": 2}),
    ("v6e:4x8", {"pipe": 2, "data": 4, "tensor": 4}),
    ("v6e:4x8", {"data": 16, "tensor": 2}),
    ("v6e:8x8", {"data": 16, "tensor": 4}),
    ("v6e:8x8", {"data": 32, "tensor": 2}),
    ("v6e:8x8", {"pipe": 4, "data": 8, "tensor": 2}),
    ("v5p:4x4x4", {"pipe": 2, "data": 8, "tensor": 4}),
    ("v5p:4x4x4", {"pipe": 8, "data": 4, "tensor": 2}),
]
COVERING = 1  # the first ones; the others are `full`


def extents(group: list[list[int]]) -> dict[str, int]:
    """{dim along which the places differ: by how many}."""
    counts = [len(set(column)) for column in zip(*group)]
    return {dim: count for dim, count in zip(DIMS, counts) if count > 1}


def busiest(groups: list[list[list[int]]]) -> int:
    """Groups that pass the busiest link between their ends."""
    passing: Counter[Any] = Counter()
    for group in groups:
        for dim in range(len(group[0])):
            lines: dict[Any, list[int]] = {}
            for place in group:
                lines.setdefault((*place[:dim], *place[dim + 1 :]), []).append(place[dim])
            for line, at in lines.items():
                passing.update((dim, line, link) for link in range(min(at), max(at)))
    return max(passing.values())


def busiest_of_messages(pairs: list[list[list[int]]]) -> int:
    """Messages in one direction on the busiest link, each routed along one dim after the other."""
    passing: Counter[Any] = Counter()
    for source, to in pairs:
        for dim, (start, end) in enumerate(zip(source, to)):
            line, links = (*to[:dim], *source[dim + 1 :]), range(min(start, end), max(start, end))
            passing.update((dim, line, start < end, link) for link in links)
    return max(passing.values())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("written", "mesh"),
    [
        pytest.param(*each, marks=() if n < COVERING else pytest.mark.full)
        for n, each in enumerate(MESHES)
    ],
)
def test_collectives_of_an_axis_run_over_the_links_that_the_plan_names(written, mesh):
    target = target_of(written)
    sizes = resolve_sizes(mesh, target.count)
    layout, links = layout_of(target, sizes), Links(target, sizes)
    assert split_dims(target, sizes)
    found = run_on_topology("tests.system.split_torus:places", written, mesh=mesh)
    over_all = set()
    for one in found:
        named = {dim for axis in one["axes"] for dim in layout[axis]}
        assert all(set(extents(group)) <= named for group in one["groups"])
        axis, permutes = one["axes"][0], one["kind"] == "collective-permute"
        # XLA reshards a few small arrays over parts of axes, and permutes over several.
        if len(one["axes"]) > 1 or len(one["groups"][0]) != (2 if permutes else sizes[axis]):
            continue
        # The price divides a link's bandwidth by the groups or messages that pass it.
        sharing = links.route((axis,)).sharing
        if permutes:
            assert busiest_of_messages(one["groups"]) == sharing
            continue
        over_all.add(axis)
        assert all(extents(group) == layout[axis] for group in one["groups"])
        assert busiest(one["groups"]) == sharing
    assert over_all == set(mesh)
