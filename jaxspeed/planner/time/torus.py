"""Layout of a mesh on a TPU torus: whether it is possible, and each axis's links; no compiler."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspeed.errors import PlacementError
from jaxspeed.hardware.targets import Target, factorizations
from jaxspeed.placement.mesh import AXES, laid_out
from jaxspeed.placement.show import mesh_text

_TRIES, _SHOWN = 60, 4


@dataclass(frozen=True)
class _Standin:
    """A stand-in for a device, with the attributes that JAX's mesh layout reads."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    process_index: int
    slice_index: int


def refuse_torus(target: Target, sizes: Mapping[str, int]) -> None:
    """Raise PlacementError, with the nearest possible meshes, if the target cannot hold this one.

    Args:
      target: devices, which may be absent.
      sizes: sizes of all mesh axes.
    """
    if not target.topology:
        return
    devices = _standins(target)
    if _holds(sizes, devices):
        return
    near = itertools.islice(_nearest(sizes), _TRIES)
    works = [mesh_text(other) for other in near if _holds(other, devices)][:_SHOWN]
    hint = f"; possible: {'; '.join(works)}" if works else ""
    raise PlacementError(
        f"mesh: {mesh_text(sizes)} cannot be laid out on {target}, where each axis takes entire "
        f"dims of the torus{hint}"
    )


def can_hold(target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether this mesh can be laid out on the target."""
    return not target.topology or _holds(sizes, _standins(target))


def placed_on(target: Target, sizes: Mapping[str, int]) -> Any:
    """[*mesh, 1 + dims]: of each device its slice or node, and its coordinates on a torus."""
    shape, dims = tuple(sizes[axis] for axis in AXES), len(target.topology)
    if not dims:
        return (np.arange(target.count) // target.node).reshape(*shape, 1)
    mesh = laid_out(shape, _standins(target))
    places = [(device.slice_index, *device.coords[:dims]) for device in mesh.flat]
    return np.array(places).reshape(*shape, -1)


def extents(placed: Any, axes: Sequence[str]) -> list[int]:
    """Of the first devices along mesh axes: over how many slices or nodes, and along each dim."""
    along = tuple(slice(None) if axis in axes else 0 for axis in AXES)
    places = placed[along].reshape(-1, placed.shape[-1])
    return [len(set(column)) for column in places.T.tolist()]


def _standins(target: Target) -> list[_Standin]:
    chip, dims = target.chip, (*target.topology, 1)[:3]
    places = itertools.product(*map(range, reversed(dims)))
    each = itertools.product(range(target.slices), places, range(chip.per_chip))
    return [
        _Standin(i, chip.platform, chip.kind, tuple(reversed(place)), core, 0, which)
        for i, (which, place, core) in enumerate(each)
    ]


def _holds(sizes: Mapping[str, int], devices: list[_Standin]) -> bool:
    try:
        laid_out(tuple(sizes[axis] for axis in AXES), devices)
    except NotImplementedError:
        return False
    return True


def _nearest(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes of as many devices over the same axes and `data`, the most similar first."""
    used = [axis for axis in AXES if sizes[axis] > 1 or axis == "data"]
    total = math.prod(sizes.values())

    def apart(other: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / sizes[axis])) for axis, n in zip(used, other))

    for other in sorted(factorizations(total, len(used)), key=apart):
        yield {**sizes, **dict(zip(used, other))}


# -- links of each mesh axis -----------------------------------------------------------------------

DIMS = ("x", "y", "z")  # of a torus


def layout_of(target: Target, sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """{axis larger than one: {kind of link: its extent along the link}}.

    The links are the dims of a torus (`x`, `y`, `z`), `core` within its chips and `slice` between
    tori; for GPUs `node` within a node and `network` between nodes. `data 16` on v5p:4x4x8 may be
    `{"x": 4, "y": 4}`.

    Args:
      target: devices on which the mesh can be laid out.
      sizes: sizes of all mesh axes.
    """
    placed, found = placed_on(target, sizes), {}
    inside, outside = ("core", "slice") if target.topology else ("node", "network")
    for axis in AXES:
        if sizes[axis] > 1:
            across, *dims = extents(placed, (axis,))
            same = sizes[axis] // across // math.prod(dims)  # at the same coordinates
            links = {**dict(zip(DIMS, dims)), inside: same, outside: across}
            found[axis] = {link: n for link, n in links.items() if n > 1}
    return found
