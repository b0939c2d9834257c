"""Along which links of a target each axis of a mesh lies."""

import math
from collections.abc import Mapping

import numpy as np

from jaxspeed.placement.mesh import AXES
from jaxspeed.plan.targets import Target
from jaxspeed.plan.torus import placed_on

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
    shape = tuple(sizes[axis] for axis in AXES)
    placed = np.array(placed_on(target, sizes)).reshape(*shape, -1)
    found = {}
    for number, axis in enumerate(AXES):
        if sizes[axis] > 1:
            first = tuple(slice(None) if i == number else 0 for i in range(len(AXES)))
            outside, *dims = (len(set(places)) for places in placed[first].T.tolist())
            inside = sizes[axis] // outside // math.prod(dims)  # at one and the same place
            links = {**dict(zip(DIMS, dims)), _INSIDE[bool(dims)]: inside}
            links[_OUTSIDE[bool(dims)]] = outside
            found[axis] = {link: n for link, n in links.items() if n > 1}
    return found


_INSIDE = {True: "core", False: "node"}  # by whether there is a torus
_OUTSIDE = {True: "slice", False: "network"}
