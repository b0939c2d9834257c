"""The axes of the mesh in the trace's context that an operation may cut its arrays over."""

from __future__ import annotations

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


def over_tensor(ndim: int, dim: int) -> NamedSharding:
    """One dim cut over the tensor axis, and the others as the compiler finds them."""
    entries: list[Any] = [P.UNCONSTRAINED] * ndim
    entries[dim] = TENSOR
    return NamedSharding(jax.sharding.get_abstract_mesh(), P(*entries))
