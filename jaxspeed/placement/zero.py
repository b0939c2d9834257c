"""ZeRO sharding: choose the dim of a leaf to shard over ZeRO's axes, and its padding.

Stacks that are not in place are sharded over `pipe` by the same rule (`placement/stacks.py`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jaxspeed.axes import product, storing_axes
from jaxspeed.placement.specs import as_entry, by_dim, entry_axes, num_shards

# Cost, as a share of the leaf's bytes, of sharding a dim that should stay unsharded. A scan slices
# the stacked `layers` dim, and one layer is gathered at a time; lookups and the chunked
# cross-entropy walk along `vocab`. So both are sharded only where padding would cost more.
# `head_dim` is the inner part of a matrix's dim, `heads` the outer one with contiguous shards.
RELUCTANCE = {
    **dict.fromkeys(("layers", "stages"), 0.25),
    **dict.fromkeys(("vocab", "block_vocab"), 0.125),
    "head_dim": 0.01,
}

# The same for the window of a convolution's kernel [*window, in, out]: each device would compute
# some offsets of a gradient whose samples are replicated. XLA's partitioner fails at that for a
# strided transposed convolution with a window as wide as the axis ("Slice dim size 1 greater than
# dynamic slice dimension: 0", jax 0.11.2 and 0.12.0.1). It costs as much as doubling the leaf.
WINDOW_RELUCTANCE = 1.0

# TPUs store the last two dims of an array in tiles of 8 x 128. Where a shard ends inside a tile, or
# has an odd number of them along the last dim, XLA reduces a gradient by all-reduce, at twice
# the cost of a reduce-scatter (bf16 for v5e, jax 0.12.0.1: 128 and 384 columns).
TILE = (8, 256)


class ZeroSharding(NamedTuple):
    """Spec of a leaf with the new axes in it, and the padded shape that is stored."""

    spec: PartitionSpec
    stored_shape: tuple[int, ...]


def shard_leaf(
    shape: Sequence[int],
    spec: PartitionSpec,
    names: Sequence[str | None],
    axis_sizes: Mapping[str, int],
    axes: Sequence[str] | None = None,
    *,
    kept: int | None = None,
    inner: str | None = None,
    multiples: Sequence[int] = (),
) -> ZeroSharding | None:
    """Add `axes` to a leaf's spec on the dim that divides best; None if no dim can be sharded.

    The best dim is the one whose padding adds least; among equals one that no axis shards yet, then
    one that is not the last and has shards of complete tiles, then the largest. `names` are the
    leaf's logical dims, as far as they are known.

    Args:
      axes: by default those over which ZeRO stores this leaf.
      kept: a dim that may not be sharded.
      inner: an axis that shards inside of `axes` where both shard one dim. They share one only
        where any other would add more.
      multiples: for each dim the number of which a shard has a multiple; 1 by default.
    """
    dims = [dim for dim in range(len(shape)) if dim != kept]
    axes = storing_axes(spec) if axes is None else axes
    axes = [axis for axis in axes if axis_sizes[axis] > 1]
    if not axes or not dims or 0 in shape:
        return None
    entries, names = by_dim(spec, len(shape)), by_dim(names, len(shape))
    ranks = product(axes, axis_sizes)
    shards = [ranks * num_shards(entry, axis_sizes) for entry in entries]
    steps = [
        n * multiple for n, multiple in zip(shards, multiples or [1] * len(shape), strict=True)
    ]
    stored = [-(-size // step) * step for size, step in zip(shape, steps, strict=True)]

    window = window_dims(shape, names)

    def cost(dim: int) -> tuple[float, bool, bool, int, int]:
        growth = stored[dim] / shape[dim] - 1 + RELUCTANCE.get(names[dim] or "", 0.0)
        growth += WINDOW_RELUCTANCE * (dim in window)
        from_last = len(shape) - 1 - dim
        tile = TILE[1 - from_last] if from_last < 2 else 1
        in_tiles = stored[dim] // shards[dim] % tile == 0
        rank = 2 if not in_tiles else 1 if from_last == 0 else 0
        return growth, inner in entry_axes(entries[dim]), bool(entries[dim]), rank, -shape[dim]

    dim = min(dims, key=cost)
    before = entry_axes(entries[dim])
    outer = [a for a in before if a != inner]
    entries[dim] = as_entry((*outer, *axes, *([inner] if inner in before else [])))
    return ZeroSharding(PartitionSpec(*entries), (*shape[:dim], stored[dim], *shape[dim + 1 :]))


def window_dims(shape: Sequence[int], names: Sequence[str | None]) -> set[int]:
    """Find the dims that are by shape the window of a convolution's kernel: [*window, in, out].

    Those without a name that are smaller than the larger of the last two. So is a stack of layers
    or experts, which should not be sharded first either; [heads, head_dim, embed] has none.
    """
    if len(shape) < 3 or (len(shape) == 3 and shape[0] * shape[1] == shape[2]):
        return set()
    return {d for d in range(len(shape) - 2) if names[d] is None and shape[d] < max(shape[-2:])}
