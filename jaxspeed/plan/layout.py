"""Along which links of a target each axis of a mesh lies."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspeed.placement.mesh import AXES, laid_out
from jaxspeed.plan.targets import Target
from jaxspeed.plan.torus import standins

DIMS = ("x", "y", "z")  # of a torus


def layout_of(target: Target, sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Of each axis longer than one: how many places it takes along each kind of link.

    The links are the dims of a torus (`x`, `y`, `z`), `core` within its chips and `slice` between
    tori; of GPUs `node` within a node and `network` between nodes. `data 16` on v5p:4x4x8 may be
    `{"x": 4, "y": 4}`.

    Args:
      target: devices that can hold the mesh.
      sizes: of all axes.
    """
    placed = _placed(target, tuple(sizes[axis] for axis in AXES))
    found = {}
    for number, axis in enumerate(AXES):
        if sizes[axis] > 1:
            first = tuple(slice(None) if i == number else 0 for i in range(len(AXES)))
            along = [len(set(places)) for places in zip(*placed[first])]
            found[axis] = {link: n for link, n in zip(_links(target), along) if n > 1}
    return found


def _links(target: Target) -> tuple[str, ...]:
    if target.topology:
        return (*DIMS[: len(target.topology)], "core", "slice")
    return ("node", "network")


def _placed(target: Target, shape: tuple[int, ...]) -> Any:
    """The place of each device of the mesh, as `_links` names its parts; an array of tuples."""
    if target.topology:
        dims = len(target.topology)
        devices = laid_out(shape, standins(target))
        places = [(*d.coords[:dims], d.core_on_chip, d.slice_index) for d in devices.flat]
    else:
        places = [(i % target.node, i // target.node) for i in range(target.count)]
    placed = np.empty(len(places), dtype=object)
    placed[:] = places
    return placed.reshape(shape)
