"""Split of a saved activation between host and device memory.

A part of every sample is offloaded rather than some layers in full: each layer transfers as much,
and a loop over layers keeps one body. The part is the first rows of one dim, in each shard of it,
so the split communicates nothing.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxspeed.ops.free_axes import TENSOR
from jaxspeed.placement.memory_kinds import on_device, on_host

# Rows are divided where tiles of a TPU end, if that leaves so many steps to choose from.
_TILES, _STEPS = (128, 16, 8), 16
LARGEST_ERROR = 1 / (2 * _STEPS)  # of a share, if the array has a dim of so many rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitActivation:
    """An activation in two parts along a dim that is [shards, rows of a shard]."""

    host: jax.Array
    device: jax.Array
    dim: int = field(metadata={"static": True})
    shards: int = field(metadata={"static": True})

    # As of an array, for `ResidualPolicy`.

    @property
    def ndim(self) -> int:
        return self.device.ndim

    @property
    def dtype(self) -> Any:
        return self.device.dtype


def offloaded(x: jax.Array, ratio: float) -> jax.Array | SplitActivation:
    """The activation with this share of it in host memory; unchanged if it is there already."""
    if on_host(x):
        return x
    parts = split(x, ratio)
    if not isinstance(parts, SplitActivation):
        return jax.device_put(x, jax.memory.Space.Host)
    return replace(parts, host=jax.device_put(parts.host, jax.memory.Space.Host))


def fetched(x: jax.Array | SplitActivation) -> jax.Array:
    """The activation on the device: the inverse of `offloaded`."""
    return joined(on_device(x))


def split(x: jax.Array, ratio: float) -> jax.Array | SplitActivation:
    """An activation divided by the ratio, without a transfer; itself if all of it is one part."""
    dim, shards, rows = _place(x.shape, ratio)
    if rows * shards == x.shape[dim]:
        return x
    divided, axis = _divided(x, dim, shards)
    host, device = jax.lax.split(divided, (rows, divided.shape[axis] - rows), axis)
    return SplitActivation(_merged(host, dim, shards), _merged(device, dim, shards), dim, shards)


def joined(x: jax.Array | SplitActivation) -> jax.Array:
    """The inverse of `split`."""
    if not isinstance(x, SplitActivation):
        return x
    divided, axes = zip(*(_divided(part, x.dim, x.shards) for part in (x.host, x.device)))
    return _merged(jax.lax.concatenate(divided, axes[0]), x.dim, x.shards)


def _divided(x: jax.Array, dim: int, shards: int) -> tuple[jax.Array, int]:
    """The array with `dim` as [shards, rows], and the dim of the rows."""
    if shards == 1:
        return x, dim
    shape = *x.shape[:dim], shards, x.shape[dim] // shards, *x.shape[dim + 1 :]
    return x.reshape(shape), dim + 1


def _merged(x: jax.Array, dim: int, shards: int) -> jax.Array:
    return x if shards == 1 else x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _place(shape: tuple[int, ...], ratio: float) -> tuple[int, int, int]:
    """(dim, its shards over tensor, offloaded rows of each): the closest to the ratio.

    Not the first dim, of samples, which are few on a device and sharded over it.
    """
    size = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
    candidates = []
    for dim in range(1, len(shape)):
        shards = size if shape[dim] % size == 0 else 1
        shard_rows = shape[dim] // shards
        tile = next((t for t in _TILES if shard_rows % t == 0 and shard_rows // t >= _STEPS), 1)
        rows = min(shard_rows, max(1, round(shard_rows * ratio / tile)) * tile)
        candidates.append((abs(rows / shard_rows - ratio), dim, shards, rows))
    return min(candidates)[1:]
