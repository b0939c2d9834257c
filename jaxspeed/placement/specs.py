"""What a PartitionSpec says: the mesh axes that shard each dim."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

Entry = str | tuple[str, ...] | None  # of one dim; UNCONSTRAINED names no axis


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The axes that shard one dim, the outermost first."""
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def as_entry(axes: tuple[str, ...]) -> Entry:
    """The axes that shard one dim, in a PartitionSpec's form."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def spec_axes(spec: Iterable[Any]) -> frozenset[str]:
    """All axes that shard an array."""
    return frozenset(axis for entry in spec for axis in entry_axes(entry))


def without_axes(spec: Iterable[Any], axes: Collection[str]) -> PartitionSpec:
    """What other axes shard."""
    left = (tuple(axis for axis in entry_axes(entry) if axis not in axes) for entry in spec)
    return PartitionSpec(*map(as_entry, left))


def sharded_dim(spec: Iterable[Any], axis: str) -> int | None:
    """The first dim that an axis shards."""
    return next((dim for dim, entry in enumerate(spec) if axis in entry_axes(entry)), None)


def by_dim(values: Iterable[Any], ndim: int) -> list[Any]:
    """A value for each dim; None for the last ones, which specs and names may leave out."""
    told = list(values)
    return [*told, *([None] * (ndim - len(told)))]


def num_shards(entry: Any, axis_sizes: Mapping[str, int]) -> int:
    """Into how many parts one dim is sharded."""
    return math.prod(axis_sizes[axis] for axis in entry_axes(entry))
