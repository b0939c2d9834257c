"""Layout of a mesh on a TPU torus: each axis's links, and whether axes share dims; no compiler."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspeed.axes import DATA, axis_names
from jaxspeed.errors import PlacementError
from jaxspeed.hardware.targets import Target, factorizations
from jaxspeed.placement.mesh import laid_out
from jaxspeed.placement.show import mesh_text

_TRIES, _SHOWN = 60, 4
DIMS = ("x", "y", "z")  # of a torus


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
    works = _near(sizes, lambda other: _holds(other, devices))
    hint = f"; possible: {works}" if works else ""
    raise PlacementError(
        f"mesh: {mesh_text(sizes)} cannot be laid out on {target}, whose dims JAX cannot split "
        f"so{hint}"
    )


def can_hold(target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether this mesh can be laid out on the target."""
    return not target.topology or _holds(sizes, _standins(target))


def placed_on(target: Target, sizes: Mapping[str, int]) -> Any:
    """[*mesh, 1 + dims]: of each device its slice or node, and its coordinates on a torus."""
    shape, dims = tuple(sizes[axis] for axis in axis_names()), len(target.topology)
    if not dims:
        return (np.arange(target.count) // target.node).reshape(*shape, 1)
    mesh = laid_out(shape, _standins(target))
    places = [(device.slice_index, *device.coords[:dims]) for device in mesh.flat]
    return np.array(places).reshape(*shape, -1)


def groups_of(placed: Any, axes: Sequence[str]) -> Any:
    """[groups, members, 1 + dims]: the places of the groups of devices along mesh axes."""
    names = axis_names()
    last = [names.index(axis) for axis in axes]
    moved = np.moveaxis(placed, last, range(len(names) - len(last), len(names)))
    return moved.reshape(-1, math.prod(placed.shape[n] for n in last), placed.shape[-1])


def extents(group: Any) -> list[int]:
    """The extent of a group: its number of slices or nodes, then of places along each dim."""
    return [len(set(column)) for column in group.T.tolist()]


def _standins(target: Target) -> list[_Standin]:
    chip, dims = target.chip, (*target.topology, 1)[:3]
    places = itertools.product(*map(range, reversed(dims)))
    positions = itertools.product(range(target.slices), places, range(chip.per_chip))
    return [
        _Standin(i, chip.platform, chip.kind, tuple(reversed(place)), core, 0, which)
        for i, (which, place, core) in enumerate(positions)
    ]


def _holds(sizes: Mapping[str, int], devices: list[_Standin]) -> bool:
    try:
        laid_out(tuple(sizes[axis] for axis in axis_names()), devices)
    except NotImplementedError:
        return False
    return True


def _near(sizes: Mapping[str, int], works: Callable[[Mapping[str, int]], bool]) -> str:
    """The most similar meshes that work, as text."""
    near = filter(works, itertools.islice(_nearest(sizes), _TRIES))
    return "; ".join(map(mesh_text, itertools.islice(near, _SHOWN)))


def _nearest(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes of as many devices over the same axes and `data`, the most similar first."""
    used = [axis for axis in axis_names() if sizes[axis] > 1 or axis == DATA]
    total = math.prod(sizes.values())

    def apart(other: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / sizes[axis])) for axis, n in zip(used, other))

    for other in sorted(factorizations(total, len(used)), key=apart):
        yield {**sizes, **dict(zip(used, other))}


# -- links of each mesh axis -----------------------------------------------------------------------


def layout_of(target: Target, sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """{axis larger than one: {kind of link: its extent along the link}}.

    The links are the dims of a torus (`x`, `y`, `z`), `core` within its chips and `slice` between
    tori; for GPUs `node` within a node and `network` between nodes. `data 16` on v5p:4x4x8 may be
    `{"x": 4, "y": 4}`.

    Args:
      target: devices on which the mesh can be laid out.
      sizes: sizes of all mesh axes.
    """
    placed, layout = placed_on(target, sizes), {}
    inside, outside = ("core", "slice") if target.topology else ("node", "network")
    for axis in axis_names():
        if sizes[axis] > 1:
            across, *dims = extents(groups_of(placed, (axis,))[0])
            same = sizes[axis] // across // math.prod(dims)  # at the same coordinates
            links = {**dict(zip(DIMS, dims)), inside: same, outside: across}
            layout[axis] = {link: n for link, n in links.items() if n > 1}
    return layout


def split_dims(target: Target, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """{dim of the torus that several mesh axes share: those axes}."""
    layout = layout_of(target, sizes)
    shared = {dim: [axis for axis, links in layout.items() if dim in links] for dim in DIMS}
    return {dim: axes for dim, axes in shared.items() if len(axes) > 1}


def layout_text(target: Target, sizes: Mapping[str, int]) -> str:
    """The links of each axis; where axes share a dim, the nearest meshes that take entire ones."""

    def link_text(link: str, extent: int) -> str:
        size = dict(zip(DIMS, target.topology)).get(link, extent)
        return f"{link} ({extent} of {size})" if size != extent else f"{link} {extent}"

    layout = layout_of(target, sizes)
    axes = [
        f"{axis} along {', '.join(link_text(*link) for link in links.items())}"
        for axis, links in layout.items()
    ]
    text = f"links  {'; '.join(axes)}"
    shared = split_dims(target, sizes)
    if not shared:
        return text
    why = ", ".join(f"{dim} by {' and '.join(of)}" for dim, of in shared.items())
    works = _near(sizes, lambda other: can_hold(target, other) and not split_dims(target, other))
    hint = f"\n       entire dims: {works}" if works else ""
    return f"{text}\n       shared, so slower: {why}{hint}"
