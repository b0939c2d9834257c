"""Mesh axes of the trace's context that are not manual: those an operation may shard over."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import TENSOR, axes_of_dim, product, sample_axes


def free_axes(mesh: Any = None) -> dict[str, int]:
    """{axis: size} of a mesh (by default the context's), without manual axes of a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind is not AxisType.Manual}


def free_sample_axes(
    size: int | None = None, mesh: Any = None, also: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The axes that shard the samples here, outermost first; none if they do not divide `size`.

    Args:
      mesh: by default the context's.
      also: axes that shard the samples of this array as well.
    """
    free = free_axes(mesh)
    axes = tuple(axis for axis in (*sample_axes(), *also) if free.get(axis, 1) > 1)
    return axes if size is None or size % product(axes, free) == 0 else ()


def free_sample_shards(mesh: Any = None) -> int:
    """The number of shards of the samples here."""
    return product(sample_axes(), free_axes(mesh))


def device_kind() -> str:
    """The kind of the devices of the context's mesh, by default of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0].device_kind if device is None else device.device_kind


def tensor_parts() -> int:
    """The size of the tensor axis; 1 if the context has none."""
    return free_axes().get(TENSOR, 1)


def vocabulary_axes() -> tuple[str, ...]:
    """The axes that shard a vocabulary: tensor, and pipe, whose stages share the head."""
    free = free_axes()
    return tuple(axis for axis in axes_of_dim("vocab") if free.get(axis, 1) > 1)


def vocabulary_parts() -> int:
    """The number of shards of a vocabulary."""
    free = free_axes()
    return math.prod(free[axis] for axis in vocabulary_axes())


def over_vocabulary(ndim: int, dim: int) -> NamedSharding:
    """One dim sharded as a vocabulary, the others unconstrained."""
    entries: list[Any] = [P.UNCONSTRAINED] * ndim
    entries[dim] = vocabulary_axes() or None
    return NamedSharding(jax.sharding.get_abstract_mesh(), P(*entries))
