"""The steps of an all-gather over three dims of a torus.

Over three closed dims (v4 and v5p slices from 4x4x4) libtpu 0.0.52 compiles an all-gather to an
all-reduce of zeros with the shard written into them: an fp32 buffer of the full array besides the
result, and four times the bytes of bf16 shards on the links. Over fewer dims at a time it is an
all-gather each: of several axes over one after the other, of one axis over one dim and then over
the other two.
"""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxspeed.placement.specs import entry_axes, without_axes

CLOSED = 4  # the least size of a closed dim
INNER = "_inner"  # suffix of the axis that is gathered first


def steps_between(stored: NamedSharding, gathered: NamedSharding) -> list[NamedSharding]:
    """The shardings between the steps; none if one step does."""
    mesh = stored.mesh
    if not isinstance(mesh, Mesh) or jax.sharding.get_abstract_mesh().manual_axes:
        return []
    before, after = (
        [axis for entry in sharding.spec for axis in entry_axes(entry)]
        for sharding in (stored, gathered)
    )
    axes = [axis for axis in before if axis not in after and mesh.shape[axis] > 1]
    spec, steps = stored.spec, list[NamedSharding]()
    while axes and _over_three_dims(mesh, tuple(axes)):
        *axes, inner = axes  # the devices along the last axis are nearest
        divided = _divided(mesh, inner) if _over_three_dims(mesh, (inner,)) else None
        steps += [NamedSharding(divided, spec)] if divided else []
        spec = without_axes(spec, (inner,))
        steps += [NamedSharding(mesh, spec)] if axes else []
    return steps


@functools.cache
def _over_three_dims(mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether these axes together are over three closed dims of one torus."""
    devices = _lines(mesh, axes)[0]
    slices = {getattr(device, "slice_index", None) for device in devices}
    columns = _places(devices).T.tolist()
    return len(slices) == 1 and sum(len(set(column)) >= CLOSED for column in columns) >= 3


def _lines(mesh: Mesh, axes: Sequence[str]) -> np.ndarray:
    """The devices that differ in these axes alone, in rows."""
    at = [mesh.axis_names.index(axis) for axis in axes]
    size = math.prod(mesh.devices.shape[d] for d in at)
    return np.moveaxis(mesh.devices, at, range(-len(at), 0)).reshape(-1, size)


def _places(devices: np.ndarray) -> np.ndarray:
    return np.array([getattr(device, "coords", ()) for device in devices])


@functools.cache
def _divided(mesh: Mesh, axis: str) -> Mesh | None:
    """The mesh with an axis over three dims of a torus divided: two dims, and an inner one."""
    at = mesh.axis_names.index(axis)
    size = mesh.devices.shape[at]
    places = _places(_lines(mesh, [axis])[0])
    lines = [n for n in range(2, size) if size % n == 0 and _is_line(places.reshape(-1, n, 3))]
    if not lines:
        return None
    inner, shape, names = lines[-1], list(mesh.devices.shape), list(mesh.axis_names)
    shape[at : at + 1] = [size // inner, inner]
    names.insert(at + 1, axis + INNER)
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _is_line(groups: np.ndarray) -> bool:
    """Whether each group [number, size, dim] runs along one dim of the torus."""
    return all(sum(len(set(column)) > 1 for column in group.T.tolist()) == 1 for group in groups)
