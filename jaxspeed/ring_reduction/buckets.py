"""Buckets: many leaves as few arrays of N chunks, so that a message is large and rings are few.

A leaf that is cut over the ranks is laid out so that rank r's chunk of the bucket is its cut of
each leaf: after the first phase nothing is left to exchange. Whole leaves follow each other flat,
and only the end of their bucket is padded. The two never share a bucket, nor do unlike dtypes.
Complex numbers go round as pairs of real ones.
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
    """One leaf as a device has it, whole over the ranks of its ring.

    Attributes:
      dim: where the ranks cut it, into equal parts; None: nowhere.
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
        """How many real numbers it is."""
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
    """Leaves that go round together, as [ranks, length]."""

    parts: tuple[BucketLeaf, ...]
    ranks: int

    @property
    def is_cut(self) -> bool:
        """Whether each rank ends with its cut of the leaves, and not with all of them."""
        return self.parts[0].dim is not None

    @property
    def length(self) -> int:
        """Of one rank's chunk."""
        return -(-sum(part.size for part in self.parts) // self.ranks)

    @property
    def dtype(self) -> Any:
        """Of the real numbers that travel."""
        return (
            jnp.finfo(self.parts[0].dtype).dtype
            if self.parts[0].is_complex
            else self.parts[0].dtype
        )

    def laid_out(self, leaves: Mapping[str, Array]) -> Array:
        """[ranks, length] of whole leaves by path, in the bucket's dtype."""
        real = {p.path: p.to_real(leaves[p.path]).astype(self.dtype) for p in self.parts}
        if self.is_cut:
            return jnp.concatenate([_in_cuts(real[p.path], p, self.ranks) for p in self.parts], 1)
        flat = jnp.concatenate([real[p.path].reshape(-1) for p in self.parts])
        return jnp.pad(flat, (0, self.ranks * self.length - flat.size)).reshape(self.ranks, -1)

    def own_chunk(self, cuts: Mapping[str, Array]) -> Array:
        """[length] of one rank's cuts."""
        return jnp.concatenate([p.to_real(cuts[p.path]).reshape(-1) for p in self.parts])

    def cuts(self, chunk: Array) -> dict[str, Array]:
        """One rank's cut of each leaf, from its chunk [length]."""
        sizes = [part.size // self.ranks for part in self.parts]
        return {
            part.path: part.from_real(flat.reshape(_cut_shape(part, self.ranks)))
            for part, flat in zip(self.parts, _split(chunk, sizes, 0), strict=True)
        }

    def leaves(self, chunks: Array) -> dict[str, Array]:
        """The whole leaves, from all chunks [ranks, length]."""
        if self.is_cut:
            sizes = [part.size // self.ranks for part in self.parts]
            columns = _split(chunks, sizes, 1)
            return {p.path: _from_cuts(x, p) for p, x in zip(self.parts, columns, strict=True)}
        flats = _split(chunks.reshape(-1), [part.size for part in self.parts], 0)
        return {
            p.path: p.from_real(x.reshape(p.real_shape))
            for p, x in zip(self.parts, flats, strict=True)
        }


def buckets_of(parts: Iterable[BucketLeaf], ranks: int, nbytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most so many bytes, or of one leaf that is larger, in the leaves' order."""
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


def _cut_shape(part: BucketLeaf, ranks: int) -> tuple[int, ...]:
    return tuple(n // ranks if d == part.dim else n for d, n in enumerate(part.real_shape))


def _in_cuts(leaf: Array, part: BucketLeaf, ranks: int) -> Array:
    """[ranks, length]: each rank's cut, flat."""
    dim = part.dim
    assert dim is not None
    before, after = part.real_shape[:dim], part.real_shape[dim:]
    folded = leaf.reshape(*before, ranks, after[0] // ranks, *after[1:])
    return jnp.moveaxis(folded, dim, 0).reshape(ranks, -1)


def _from_cuts(cuts: Array, part: BucketLeaf) -> Array:
    """The leaf, of each rank's cut [ranks, length]."""
    dim, ranks = part.dim, cuts.shape[0]
    assert dim is not None
    whole = jnp.moveaxis(cuts.reshape(ranks, *_cut_shape(part, ranks)), 0, dim)
    return part.from_real(whole.reshape(part.real_shape))


def _split(x: Array, sizes: Sequence[int], axis: int) -> list[Array]:
    """Parts of these sizes along an axis; what is left over is padding."""
    found, start = [], 0
    for size in sizes:
        found.append(x[start : start + size] if axis == 0 else x[:, start : start + size])
        start += size
    return found
