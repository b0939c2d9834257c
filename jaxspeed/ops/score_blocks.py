"""Blocks of attention scores for a kernel: their sizes, what is visible in them, which to skip."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops.mask import KernelCall, Mask, Segments

SMALLEST = 16  # the least side of a product on tensor cores
SHARED = 96 * 1024  # bytes of shared memory that a program may use on every GPU since Ampere
HIDDEN = -1e30  # a hidden score, and about the log-sum-exp of a query that sees no key
NEVER = 1e30  # a log-sum-exp for which every share is 0


@dataclass(frozen=True)
class BlockPlaces:
    """One block of queries or keys: it starts at an index of the array, at a position of the mask.

    Positions are indices, and with an offset (of queries) larger by it.
    """

    start: Any
    size: int
    offset: Any = None

    @property
    def first(self) -> Any:
        return self.start if self.offset is None else self.start + self.offset

    @property
    def last(self) -> Any:
        return self.first + self.size - 1

    @property
    def places(self) -> jax.Array:
        return self.first + jnp.arange(self.size)


@dataclass(frozen=True)
class ScoreBlocks:
    """The static part of a kernel: mask and scale of the scores, and the sizes of their blocks."""

    mask: Mask
    scale: float
    soft_cap: float | None
    seq: int
    kv_seq: int
    block_q: int
    block_k: int

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        call: KernelCall,
        *,
        most: int,
        keys: float,
        tiles: int,
    ) -> ScoreBlocks:
        """Blocks of queries of up to `most`, of keys `keys` times as many.

        `tiles` of these blocks of queries fit in shared memory.
        """
        row = max(_power_of_2(q.shape[3]), SMALLEST) * q.dtype.itemsize
        block = min(most, 1 << (SHARED // (tiles * row)).bit_length() - 1)
        sides = (block, int(block * keys))
        lengths = (q.shape[1], k.shape[1])
        block_q, block_k = (
            max(SMALLEST, min(side, _power_of_2(length))) for side, length in zip(sides, lengths)
        )
        return cls(call.mask, call.scale, call.soft_cap, *lengths, block_q, block_k)

    @property
    def blocks_q(self) -> int:
        return -(-self.seq // self.block_q)

    @property
    def blocks_k(self) -> int:
        return -(-self.kv_seq // self.block_k)

    def computed(self, offset: Any = None) -> int:
        """Blocks of the scores of one head that the mask leaves, the most for an offset."""
        if offset is None:
            return self.mask.blocks(self.seq, self.kv_seq, self.block_q, self.block_k)[0]
        keys = self.mask.most_beside(self.block_q, self.block_k, self.blocks_k)
        queries = self.mask.most_beside(self.block_k, self.block_q, self.blocks_q)
        return min(self.blocks_q * keys, self.blocks_k * queries)

    def rows(self, x: jax.Array) -> jax.Array:
        """Queries [batch, seq, heads, head_dim], padded to full blocks."""
        return _padded(x, self.blocks_q * self.block_q)

    def columns(self, x: jax.Array) -> jax.Array:
        return _padded(x, self.blocks_k * self.block_k)

    def rows_of(self, i: Any, offset: Any = None) -> BlockPlaces:
        return BlockPlaces(i * self.block_q, self.block_q, offset)

    def columns_of(self, j: Any) -> BlockPlaces:
        return BlockPlaces(j * self.block_k, self.block_k)

    def scores(self, products: jax.Array) -> tuple[jax.Array, Any]:
        """(scores, the derivative of their soft cap)."""
        s = self.scale * products
        if self.soft_cap is None:
            return s, 1.0
        capped = jnp.tanh(s / self.soft_cap)
        return self.soft_cap * capped, 1 - capped * capped

    def visible(
        self, x: jax.Array, hidden: float, rows: Any, columns: Any, q_ids: Any, k_ids: Any
    ) -> jax.Array:
        """`x`, and `hidden` where a query does not see a key; positions and ids broadcast."""
        parts = []
        if self.mask.causal:
            parts.append(columns <= rows)
        if self.mask.window is not None:
            parts.append(jnp.abs(rows - columns) < self.mask.window)
        if self.kv_seq % self.block_k:
            parts.append(columns + 0 * rows < self.kv_seq)
        if q_ids is not None:
            parts.append(q_ids == k_ids)
        return jnp.where(functools.reduce(jnp.logical_and, parts), x, hidden) if parts else x

    def hides(self, rows: BlockPlaces, columns: BlockPlaces) -> Any:
        """Whether a query of one block does not see a key of another, whatever their segments."""
        hides: Any = False
        if self.mask.causal:
            hides = columns.last > rows.first
        if self.mask.window is not None:
            furthest = jnp.maximum(rows.last - columns.first, columns.last - rows.first)
            hides |= furthest >= self.mask.window
        if self.kv_seq % self.block_k:
            hides |= columns.last >= self.kv_seq
        return hides

    def keys_of(self, rows: BlockPlaces, seen: Any, i: Any) -> tuple[Any, Any]:
        """The range of blocks of keys that a block of queries sees."""
        low, high = _window(rows, self.mask.window, self.kv_seq)
        if self.mask.causal:
            high = jnp.minimum(high, rows.last)
        if rows.offset is not None:
            high = jnp.where(high < 0, -self.block_k, high)  # division rounds towards zero
        return _range(low, high, self.block_k, seen, i)

    def queries_of(
        self, columns: BlockPlaces, seen: Any, j: Any, offset: Any = None
    ) -> tuple[Any, Any]:
        """The range of blocks of queries that see a block of keys."""
        if offset is not None:
            columns = BlockPlaces(columns.start - offset, columns.size)
        low, high = _window(columns, self.mask.window, self.seq)
        if self.mask.causal:
            low = jnp.maximum(low, columns.first)
        if offset is not None:
            high = jnp.where(high < 0, -self.block_q, high)
        return _range(low, high, self.block_q, seen, j)

    def ids(self, segments: Segments | None) -> Any:
        if segments is None:
            return None
        more_q, more_k = self.blocks_q * self.block_q, self.blocks_k * self.block_k
        q, kv = segments.q.astype(jnp.int32), segments.kv.astype(jnp.int32)
        return _edged(q, more_q), _edged(kv, more_k)

    def seen_by_queries(self, segments: Segments | None) -> Any:
        """[batch, blocks of queries] twice: the range of blocks of keys of their segments."""
        return None if segments is None else _ranges(self.overlap(segments))

    def seen_by_keys(self, segments: Segments | None) -> Any:
        return None if segments is None else _ranges(self.overlap(segments).swapaxes(1, 2))

    def overlap(self, segments: Segments) -> jax.Array:
        """[batch, blocks of queries, blocks of keys], False where no id can be equal."""
        q, kv = self.ids(segments)
        q = q.reshape(len(q), self.blocks_q, self.block_q)
        kv = kv.reshape(len(kv), self.blocks_k, self.block_k)
        above = q.max(-1)[:, :, None] >= kv.min(-1)[:, None]
        return above & (q.min(-1)[:, :, None] <= kv.max(-1)[:, None])


def offset_operand(offset: jax.Array | None) -> jax.Array | None:
    """An offset as an operand of a kernel, [1]."""
    return None if offset is None else jnp.asarray(offset, jnp.int32)[None]


def read_offset(operand: Any) -> Any:
    return None if operand is None else operand[0]


def _window(block: BlockPlaces, window: int | None, length: int) -> tuple[Any, Any]:
    """(first, last) position of the other side within the window of a block."""
    if window is None:
        return 0, length - 1
    low = jnp.maximum(block.first - window + 1, 0)
    return low, jnp.minimum(block.last + window - 1, length - 1)


def _range(low: Any, high: Any, size: int, seen: Any, i: Any) -> tuple[Any, Any]:
    """(first, stop) of the blocks from position low to high, and within a given range."""
    first, stop = lax.div(jnp.int32(low), size), lax.div(jnp.int32(high), size) + 1
    if seen is not None:
        first, stop = jnp.maximum(first, seen[0][i]), jnp.minimum(stop, seen[1][i])
    return first, stop


def _ranges(overlap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first, stop) of the last dim's True, [batch, blocks] each; empty without any."""
    length = overlap.shape[-1]
    first = jnp.argmax(overlap, axis=-1)
    stop = jnp.where(overlap.any(-1), length - jnp.argmax(overlap[..., ::-1], axis=-1), 0)
    return first.astype(jnp.int32), stop.astype(jnp.int32)


def _padded(x: jax.Array, length: int) -> jax.Array:
    """[batch, length, heads, a power of 2], since Triton's tensors have such dims."""
    head_dim = max(_power_of_2(x.shape[3]), SMALLEST)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, head_dim - x.shape[3])))


def _edged(x: jax.Array, length: int) -> jax.Array:
    """Padded with the last id, which leaves the ranges of ids of blocks as they are."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), mode="edge")


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
