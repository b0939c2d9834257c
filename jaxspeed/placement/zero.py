"""ZeRO: on which dim a leaf is cut over `data`, and what is padded so that it can be."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

# What it costs, as a share of the leaf's bytes, to cut a dim that had better stay whole. A scan
# slices the stacked `layers` dim, and one layer is to be gathered at a time; lookups and the
# chunked cross-entropy walk along `vocab`. So both are cut only where padding would cost more.
RELUCTANCE = {"layers": 0.25, "vocab": 0.125}


class Cut(NamedTuple):
    """Where a leaf is cut: its spec with the data axis in it, and the shape that is stored."""

    spec: PartitionSpec
    stored_shape: tuple[int, ...]


def cut_leaf(
    shape: Sequence[int],
    spec: PartitionSpec,
    names: Sequence[str | None],
    axis_sizes: Mapping[str, int],
    axis: str = "data",
) -> Cut | None:
    """Add `axis` to a leaf's spec on the dim that divides best; None when nothing can be cut.

    The best dim is the one whose padding adds least; among equals one that no axis cuts yet, then
    the largest. `names` are the leaf's logical dims, as far as they are known.
    """
    if axis_sizes[axis] == 1 or not shape or 0 in shape:
        return None
    entries = [*spec, *([None] * (len(shape) - len(spec)))]
    names = [*names, *([None] * (len(shape) - len(names)))]
    steps = [axis_sizes[axis] * ways(entry, axis_sizes) for entry in entries]
    stored = [-(-size // step) * step for size, step in zip(shape, steps, strict=True)]

    def cost(dim: int) -> tuple[float, bool, int]:
        growth = stored[dim] / shape[dim] - 1
        return growth + RELUCTANCE.get(names[dim] or "", 0.0), bool(entries[dim]), -shape[dim]

    dim = min(range(len(shape)), key=cost)
    entries[dim] = (*_axes(entries[dim]), axis) if entries[dim] else axis
    return Cut(PartitionSpec(*entries), (*shape[:dim], stored[dim], *shape[dim + 1 :]))


def ways(entry: str | tuple[str, ...] | None, axis_sizes: Mapping[str, int]) -> int:
    """Into how many parts one entry of a PartitionSpec cuts its dim."""
    product = 1
    for axis in _axes(entry):
        product *= axis_sizes[axis]
    return product


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
