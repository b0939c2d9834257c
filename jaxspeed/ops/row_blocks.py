"""Attention for CPUs: blocks of queries, each against the keys that it may see.

Written in XLA operations. Scores that a mask hides from an entire block are not computed, and heads
are moved before the sequence once, where `plain` lets XLA:CPU transpose each operand of each
product. The backward pass recomputes a block's scores, as in FlashAttention-2 (arXiv:2307.08691):

    P = exp(S - L),  D = sum_d out dout,  dS = P (dout V^T - D),  dV = P^T dout,  dQ = dS K, ...

for the scores S and their log-sum-exp L, so that no S x S array is saved.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops.mask import Mask, Segments
from jaxspeed.ops.materialize import materialize

SMALLEST = 64  # queries of a block: products of fewer rows are slower than what they spare
# Four causal blocks compute 62% of the scores, infinitely many 50%; compile time grows with them.
MOST_BLOCKS = 4
SHORT_ROW = 16  # scores that are compared one by one


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports these dtypes."""
    return q.dtype == jnp.float32 == k.dtype


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq])."""
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    outs, sums = [], []
    for block in _blocks(mask, q.shape[1], k.shape[1]):
        s, _ = block.scores(scale * block.rows_of(q, k), keys, segments, soft_cap)
        top = _largest(s)
        shares = jnp.exp(s - top)
        total = jnp.sum(shares, axis=-1, keepdims=True)
        product = jnp.einsum("bhqk,bhkd->bhqd", shares, block.columns_of(values))
        outs.append(product / total)
        sums.append(top + jnp.log(total))
    return _joined(outs, q), _joined(sums, q)[..., 0].swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    sums: jax.Array,
    d_out: jax.Array,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    sums = sums.swapaxes(1, 2)[..., None]
    mean = jnp.sum(out * d_out, axis=-1, keepdims=True)
    blocks, d_queries, d_keys, d_values = _blocks(mask, q.shape[1], k.shape[1]), [], [], []
    for block in blocks:
        queries, d_block = scale * block.rows_of(q, k), block.rows_of(d_out, k)
        s, slope = block.scores(queries, keys, segments, soft_cap)
        shares = jnp.exp(s - block.rows_of(sums, k))
        d_shares = jnp.einsum("bhqd,bhkd->bhqk", d_block, block.columns_of(values))
        d_scores = slope * shares * (d_shares - block.rows_of(mean, k))
        # Each is read by several products; XLA would compute it anew for each.
        shares, d_scores = lax.optimization_barrier((shares, d_scores))
        d_value = jnp.einsum("bhqk,bhqd->bhkd", shares, d_block)
        d_key = jnp.einsum("bhqk,bhqd->bhkd", d_scores, queries)
        # Against XLA's product of [n, columns], whose columns the sum of blocks would transpose.
        d_value, d_key = lax.optimization_barrier((d_value, d_key))
        d_values.append(d_value)
        d_keys.append(d_key)
        d_queries.append(scale * jnp.einsum("bhqk,bhkd->bhqd", d_scores, block.columns_of(keys)))
    return _joined(d_queries, q), _summed(blocks, d_keys, k), _summed(blocks, d_values, v)


@dataclass(frozen=True)
class _Block:
    """Queries `rows` and the keys `columns` that any of them may see."""

    mask: Mask
    rows: range
    columns: range

    def rows_of(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """[batch, seq, heads, n] to [batch, kv_heads, group rows, n]."""
        x = x[:, self.rows.start : self.rows.stop]
        kv_heads, n = k.shape[2], x.shape[3]
        x = x.reshape(*x.shape[:2], kv_heads, -1, n).transpose(0, 2, 3, 1, 4)
        return x.reshape(x.shape[0], kv_heads, -1, n)

    def columns_of(self, x: jax.Array) -> jax.Array:
        return x[:, :, self.columns.start : self.columns.stop]

    def scores(
        self, q: jax.Array, k: jax.Array, segments: Segments | None, cap: float | None
    ) -> tuple[jax.Array, Any]:
        """(scores of q's rows [batch, kv_heads, group rows, columns], their cap's derivative)."""
        s = jnp.einsum("bhqd,bhkd->bhqk", q, self.columns_of(k))
        slope: Any = 1.0
        if cap is not None:
            tanh = jnp.tanh(s / cap)
            s, slope = cap * tanh, 1 - tanh * tanh
        seen = self.mask.between(self.rows, self.columns) if self.mask.hides else None
        if segments is not None:
            of_rows = segments.q[:, self.rows.start : self.rows.stop]
            of_columns = segments.kv[:, self.columns.start : self.columns.stop]
            same = Segments(of_rows, of_columns).same()[:, None, None]  # of each head
            seen = same if seen is None else seen & same
        if seen is not None:
            by_query = s.reshape(*s.shape[:2], -1, len(self.rows), len(self.columns))
            s = jnp.where(seen, by_query, jnp.finfo(s.dtype).min).reshape(s.shape)
        return s, slope


def _largest(s: jax.Array) -> jax.Array:
    """The maximum of each row [..., 1], by halves.

    XLA:CPU without YNNPACK reduces a row number by number, which takes as long as a product of it;
    the elements of two halves it compares in vectors.
    """
    while (count := s.shape[-1]) > SHORT_ROW:
        half = -(-count // 2)  # of an odd row, both halves have the middle
        s = jnp.maximum(s[..., :half], s[..., count - half :])
    return jnp.max(s, axis=-1, keepdims=True)


def _blocks(mask: Mask, seq: int, kv_seq: int) -> list[_Block]:
    """Blocks of queries; a single one where every query sees every key."""
    size = max(SMALLEST, -(-seq // MOST_BLOCKS)) if mask.hides else seq
    found = []
    for start in range(0, seq, size):
        rows = range(start, min(start + size, seq))
        low, high = map(int, mask.visible(rows.start, rows.stop - 1, kv_seq))
        # Queries behind the last key may see none: their results are undefined, but exist.
        found.append(_Block(mask, rows, range(min(low, high), high + 1)))
    return found


def _joined(blocks: list[jax.Array], q: jax.Array) -> jax.Array:
    """Results [batch, kv_heads, group rows, n] of all blocks as [batch, seq, heads, n]."""
    batch, _, heads, _ = q.shape
    kv_heads, n = blocks[0].shape[1], blocks[0].shape[3]
    split = (x.reshape(batch, kv_heads, heads // kv_heads, -1, n) for x in blocks)
    by_row = [x.transpose(0, 3, 1, 2, 4).reshape(batch, -1, heads, n) for x in split]
    return materialize(jnp.concatenate(by_row, axis=1))


def _summed(blocks: list[_Block], parts: list[jax.Array], k: jax.Array) -> jax.Array:
    """The sum of each block's part [batch, kv_heads, columns, n], [batch, kv_seq, kv_heads, n].

    From one edge of a block's columns to the next the parts of the same blocks are added: padded
    with zeros, each part would be copied first.
    """
    edges = {0, k.shape[1]} | {edge for b in blocks for edge in (b.columns.start, b.columns.stop)}
    sums = []
    for low, high in itertools.pairwise(sorted(edges)):
        of_blocks = [
            part[:, :, low - block.columns.start : high - block.columns.start]
            for block, part in zip(blocks, parts, strict=True)
            if low in block.columns
        ]
        zero = jnp.zeros((k.shape[0], k.shape[2], high - low, k.shape[3]), k.dtype)
        sums.append(functools.reduce(jnp.add, of_blocks) if of_blocks else zero)
    return materialize(jnp.concatenate(sums, axis=2).swapaxes(1, 2))
