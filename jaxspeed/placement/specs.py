"""Helpers for a PartitionSpec: the mesh axes that shard each dim."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

Entry = str | tuple[str, ...] | None  # of one dim; UNCONSTRAINED names no axis


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Axes that shard one dim, the outermost first."""
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def as_entry(axes: tuple[str, ...]) -> Entry:
    """Convert the axes that shard one dim to a PartitionSpec entry."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def spec_axes(spec: Iterable[Any]) -> frozenset[str]:
    """Axes that shard an array, on any dim."""
    return frozenset(axis for entry in spec for axis in entry_axes(entry))


def without_axes(spec: Iterable[Any], axes: Collection[str]) -> PartitionSpec:
    """Remove axes from a spec."""
    left = (tuple(axis for axis in entry_axes(entry) if axis not in axes) for entry in spec)
    return PartitionSpec(*map(as_entry, left))


def sharded_dim(spec: Iterable[Any], *axes: str) -> int | None:
    """First dim that one of the axes shards."""
    sharded = (dim for dim, entry in enumerate(spec) if set(axes).intersection(entry_axes(entry)))
    return next(sharded, None)


def by_dim(values: Iterable[Any], ndim: int) -> list[Any]:
    """Pad to one value per dim; None for the last ones, which specs and names may omit."""
    known = list(values)
    return [*known, *([None] * (ndim - len(known)))]


def num_shards(entry: Any, axis_sizes: Mapping[str, int]) -> int:
    """Number of shards of one dim."""
    return math.prod(axis_sizes[axis] for axis in entry_axes(entry))
