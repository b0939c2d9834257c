"""Gradient and parameter buckets: many leaves fused into few arrays of N chunks.

A leaf that is sharded over the ranks is laid out so that rank r's chunk of the bucket is its shard
of each leaf: after the reduce-scatter nothing is left to exchange. Unsharded leaves are flattened
and concatenated, with padding at the bucket's end only. A bucket never mixes the two, nor dtypes.
Complex numbers are sent as pairs of real ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class BucketLeaf:
    """A device's part of one leaf, unsharded over the ranks of its ring.

    Attributes:
      dim: the dim that the ranks shard evenly; None: replicated.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None = None

    @property
    def is_complex(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def real_shape(self) -> tuple[int, ...]:
        """The shape as real numbers."""
        return (*self.shape, 2) if self.is_complex else self.shape

    @property
    def size(self) -> int:
        """The count of real numbers."""
        return math.prod(self.real_shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def to_real(self, x: Array) -> Array:
        return jnp.stack([x.real, x.imag], -1) if self.is_complex else x

    def from_real(self, x: Array) -> Array:
        return jax.lax.complex(x[..., 0], x[..., 1]) if self.is_complex else x


@dataclass(frozen=True)
class Bucket:
    """Leaves that are reduced or gathered together, as [ranks, length]."""

    parts: tuple[BucketLeaf, ...]
    ranks: int

    @property
    def is_sharded(self) -> bool:
        """Whether each rank ends with its shard of the leaves instead of the full leaves."""
        return self.parts[0].dim is not None

    @property
    def length(self) -> int:
        """The length of one rank's chunk."""
        return -(-sum(part.size for part in self.parts) // self.ranks)

    @property
    def dtype(self) -> Any:
        """The dtype of the real numbers that are sent."""
        return (
            jnp.finfo(self.parts[0].dtype).dtype
            if self.parts[0].is_complex
            else self.parts[0].dtype
        )

    def to_chunks(self, leaves: Mapping[str, Array]) -> Array:
        """Full leaves by path -> [ranks, length] in the bucket's dtype."""
        real = {p.path: p.to_real(leaves[p.path]).astype(self.dtype) for p in self.parts}
        if self.is_sharded:
            return jnp.concatenate(
                [_shards_as_rows(real[p.path], p, self.ranks) for p in self.parts], 1
            )
        flat = jnp.concatenate([real[p.path].reshape(-1) for p in self.parts])
        return jnp.pad(flat, (0, self.ranks * self.length - flat.size)).reshape(self.ranks, -1)

    def own_chunk(self, shards: Mapping[str, Array]) -> Array:
        """One rank's shards by path -> its chunk [length]."""
        return jnp.concatenate([p.to_real(shards[p.path]).reshape(-1) for p in self.parts])

    def shards(self, chunk: Array) -> dict[str, Array]:
        """One rank's chunk [length] -> its shard of each leaf."""
        sizes = [part.size // self.ranks for part in self.parts]
        return {
            part.path: part.from_real(flat.reshape(_shard_shape(part, self.ranks)))
            for part, flat in zip(self.parts, _split(chunk, sizes, 0), strict=True)
        }

    def leaves(self, chunks: Array) -> dict[str, Array]:
        """All chunks [ranks, length] -> the full leaves."""
        if self.is_sharded:
            sizes = [part.size // self.ranks for part in self.parts]
            columns = _split(chunks, sizes, 1)
            return {
                p.path: _from_rows_of_shards(x, p) for p, x in zip(self.parts, columns, strict=True)
            }
        flats = _split(chunks.reshape(-1), [part.size for part in self.parts], 0)
        return {
            p.path: p.from_real(x.reshape(p.real_shape))
            for p, x in zip(self.parts, flats, strict=True)
        }


def buckets_of(parts: Iterable[BucketLeaf], ranks: int, nbytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most `nbytes`, or of one larger leaf, in the leaves' order."""
    open_: dict[Any, list[BucketLeaf]] = {}
    done: list[Bucket] = []
    for part in parts:
        kind = (part.dim is None, jnp.dtype(part.dtype))
        held = open_.setdefault(kind, [])
        if held and sum(p.nbytes for p in held) + part.nbytes > nbytes:
            done.append(Bucket(tuple(held), ranks))
            held.clear()
        held.append(part)
    return (*done, *(Bucket(tuple(held), ranks) for held in open_.values() if held))


def _shard_shape(part: BucketLeaf, ranks: int) -> tuple[int, ...]:
    return tuple(n // ranks if d == part.dim else n for d, n in enumerate(part.real_shape))


def _shards_as_rows(leaf: Array, part: BucketLeaf, ranks: int) -> Array:
    """A full leaf -> [ranks, length], each rank's shard flattened."""
    dim = part.dim
    assert dim is not None
    before, after = part.real_shape[:dim], part.real_shape[dim:]
    folded = leaf.reshape(*before, ranks, after[0] // ranks, *after[1:])
    return jnp.moveaxis(folded, dim, 0).reshape(ranks, -1)


def _from_rows_of_shards(rows: Array, part: BucketLeaf) -> Array:
    """Each rank's flattened shard [ranks, length] -> the full leaf."""
    dim, ranks = part.dim, rows.shape[0]
    assert dim is not None
    full = jnp.moveaxis(rows.reshape(ranks, *_shard_shape(part, ranks)), 0, dim)
    return part.from_real(full.reshape(part.real_shape))


def _split(x: Array, sizes: Sequence[int], axis: int) -> list[Array]:
    """Slices of these sizes along an axis, without the padding at its end."""
    slices, start = [], 0
    for size in sizes:
        slices.append(x[start : start + size] if axis == 0 else x[:, start : start + size])
        start += size
    return slices
