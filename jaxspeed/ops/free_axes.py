"""The axes of the mesh in the trace's context that an operation may cut its arrays over."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

TENSOR = "tensor"


def free_axes(mesh: Any = None) -> dict[str, int]:
    """{axis: size} without those that are manual already, inside a `shard_map`.

    Of the mesh in the trace's context, if none is given.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind is not AxisType.Manual}


def tensor_parts() -> int:
    """How many devices share the work on one sample; 1 where the context has no such axis."""
    return free_axes().get(TENSOR, 1)


def vocabulary_axes() -> tuple[str, ...]:
    """The axes whose devices share a vocabulary: the stages of a pipeline do too."""
    free = free_axes()
    return tuple(axis for axis in ("pipe", TENSOR) if free.get(axis, 1) > 1)


def vocabulary_parts() -> int:
    """How many devices share a vocabulary."""
    free = free_axes()
    return math.prod(free[axis] for axis in vocabulary_axes())


def over_vocabulary(ndim: int, dim: int) -> NamedSharding:
    """One dim cut over the devices that share a vocabulary, the others as the compiler likes."""
    entries: list[Any] = [P.UNCONSTRAINED] * ndim
    entries[dim] = vocabulary_axes() or None
    return NamedSharding(jax.sharding.get_abstract_mesh(), P(*entries))
