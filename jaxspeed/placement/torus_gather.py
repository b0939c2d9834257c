"""The first of two steps of an all-gather over three dims of a torus.

Over three closed dims (v4 and v5p slices from 4x4x4) libtpu 0.0.52 compiles an all-gather to an
all-reduce of zeros with the shard written into them: an fp32 buffer of the full array besides the
result, and twice the bytes on the links. Over one dim first, and then over the other two, it is two
all-gathers.
"""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxspeed.placement.specs import entry_axes

CLOSED = 4  # the least size of a closed dim
INNER = "_inner"  # suffix of the axis that is gathered first


def first_step(stored: NamedSharding, gathered: NamedSharding) -> NamedSharding | None:
    """The sharding between the two steps; None if one step does."""
    mesh = stored.mesh
    if not isinstance(mesh, Mesh) or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    before, after = (
        [axis for entry in sharding.spec for axis in entry_axes(entry)]
        for sharding in (stored, gathered)
    )
    axes = [axis for axis in before if axis not in after]
    divided = _divided(mesh, axes[0]) if len(axes) == 1 else None
    return NamedSharding(divided, stored.spec) if divided else None


@functools.cache
def _divided(mesh: Mesh, axis: str) -> Mesh | None:
    """The mesh with an axis over three dims of a torus divided: two dims, and an inner one."""
    at = mesh.axis_names.index(axis)
    size = mesh.devices.shape[at]
    ranks = np.moveaxis(mesh.devices, at, -1).reshape(-1, size)[0]
    coords = np.array([getattr(device, "coords", ()) for device in ranks])
    slices = {getattr(device, "slice_index", None) for device in ranks}
    if len(slices) > 1 or sum(len(set(column)) >= CLOSED for column in coords.T.tolist()) < 3:
        return None
    lines = [n for n in range(2, size) if size % n == 0 and _is_line(coords.reshape(-1, n, 3))]
    if not lines:
        return None
    inner, shape, names = lines[-1], list(mesh.devices.shape), list(mesh.axis_names)
    shape[at : at + 1] = [size // inner, inner]
    names.insert(at + 1, axis + INNER)
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _is_line(groups: np.ndarray) -> bool:
    """Whether each group [number, size, dim] runs along one dim of the torus."""
    return all(sum(len(set(column)) > 1 for column in group.T.tolist()) == 1 for group in groups)
