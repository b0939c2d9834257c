"""Attention in XLA operations: blocks of queries, each against the keys that it may see.

For fp32 it is the kernel of CPUs, and it serves where no kernel does. Scores that a mask hides from
an entire block are not computed, and heads are moved before the sequence once, where `plain` lets
XLA:CPU transpose each operand of each product. The backward pass recomputes a block's scores, as in
FlashAttention-2 (arXiv:2307.08691):

    P = exp(S - L),  D = sum_d out dout,  dS = P (dout V^T - D),  dV = P^T dout,  dQ = dS K, ...

for the scores S and their log-sum-exp L, so that no S x S array is saved.

With an offset, the keys that a block of queries sees are known at run time only: the second part of
this file loops over them, and does so for narrow types too.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops.mask import KernelCall, Mask, Segments
from jaxspeed.ops.materialize import materialize
from jaxspeed.ops.score_blocks import HIDDEN, ScoreBlocks

SMALLEST = 64  # queries of a block: products of fewer rows are slower than what they spare
# Four causal blocks compute 62% of the scores, infinitely many 50%; compile time grows with them.
MOST_BLOCKS = 4
SHORT_ROW = 16  # scores that are compared one by one
LARGEST = 512  # queries or keys of a block of the loops


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether it is faster on CPUs than `plain`."""
    return q.dtype == jnp.float32 == k.dtype


def forward(
    call: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    offset: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]).

    Query i is at position `offset + i`. One that sees no key has a finite result, and sums so low
    that it has no share in a merge.
    """
    if offset is not None or not supports(q, k):
        loops = _Loops.of(call, q, k, segments, offset)
        return _forward_loops(q, k, v, loops)
    scale = call.scale
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    outs, sums = [], []
    for block in _blocks(call.mask, q.shape[1], k.shape[1]):
        s, _ = block.scores(scale * block.rows_of(q, k), keys, segments, call.soft_cap)
        top = _largest(s)
        shares = jnp.exp(s - top)
        total = jnp.sum(shares, axis=-1, keepdims=True)
        product = jnp.einsum("bhqk,bhkd->bhqd", shares, block.columns_of(values))
        outs.append(product / total)
        sums.append(top + jnp.log(total))
    return _joined(outs, q), _joined(sums, q)[..., 0].swapaxes(1, 2)


def backward(
    call: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    sums: jax.Array,
    d_out: jax.Array,
    *,
    offset: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""
    if offset is not None or not supports(q, k):
        loops = _Loops.of(call, q, k, segments, offset)
        return _backward_loops(q, k, v, out, sums, d_out, loops)
    scale = call.scale
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    sums = sums.swapaxes(1, 2)[..., None]
    mean = jnp.sum(out * d_out, axis=-1, keepdims=True)
    blocks, d_queries, d_keys, d_values = _blocks(call.mask, q.shape[1], k.shape[1]), [], [], []
    for block in blocks:
        queries, d_block = scale * block.rows_of(q, k), block.rows_of(d_out, k)
        s, slope = block.scores(queries, keys, segments, call.soft_cap)
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
    blocks = []
    for start in range(0, seq, size):
        rows = range(start, min(start + size, seq))
        low, high = map(int, mask.visible(rows.start, rows.stop - 1, kv_seq))
        # Queries behind the last key may see none: their results are undefined, but exist.
        blocks.append(_Block(mask, rows, range(min(low, high), high + 1)))
    return blocks


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


# -- blocks that are known at run time -------------------------------------------------------------

# A loop over the blocks of queries, and in it one over the blocks of keys that the mask and the
# segments of any sample leave, as in the kernels for GPUs.


def _forward_loops(
    q: jax.Array, k: jax.Array, v: jax.Array, loops: _Loops
) -> tuple[jax.Array, jax.Array]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    keys, values = loops.keys(k), loops.keys(v)

    def of_queries(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, queries = block

        def body(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, out = carry
            s, _ = loops.scores(queries, keys, j)
            s = loops.visible(s, HIDDEN, i, j)
            new_top = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
            shares, shrink = jnp.exp(s - new_top), jnp.exp(top - new_top)
            total = total * shrink + jnp.sum(shares, axis=-1, keepdims=True)
            part = _product("bhgqk,bhkd->bhgqd", shares.astype(v.dtype), loops.block(values, j))
            return new_top, total, out * shrink + part

        numbers = (*queries.shape[:-1], 1)
        start = jnp.full(numbers, HIDDEN, wide), jnp.zeros(numbers, wide)
        sums = jnp.zeros((*numbers[:-1], v.shape[-1]), wide)
        top, total, out = lax.fori_loop(*loops.keys_of(i), body, (*start, sums))
        total = jnp.where(total == 0, 1, total)  # no visible block
        return (out / total).astype(q.dtype), top + jnp.log(total)

    out, sums = lax.map(of_queries, (loops.numbers, loops.queries(q)))
    return loops.joined(out), loops.joined(sums)[..., 0].swapaxes(1, 2)


def _backward_loops(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    sums: jax.Array,
    d_out: jax.Array,
    loops: _Loops,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    keys, values = loops.keys(k), loops.keys(v)
    delta = jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1, keepdims=True)

    def of_queries(carry: tuple[jax.Array, jax.Array], block: Any) -> Any:
        i, queries, sums, d_out, delta = block

        def body(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = carry
            s, slope = loops.scores(queries, keys, j)
            shares = loops.visible(jnp.exp(s - sums), 0, i, j)
            d_shares = _product("bhgqd,bhkd->bhgqk", d_out, loops.block(values, j))
            d_s = (slope * shares * (d_shares - delta)).astype(q.dtype)
            d_q += _product("bhgqk,bhkd->bhgqd", d_s, loops.block(keys, j))
            d_k = loops.add(d_k, j, _product("bhgqk,bhgqd->bhkd", d_s, queries))
            part = _product("bhgqk,bhgqd->bhkd", shares.astype(d_out.dtype), d_out)
            return d_q, d_k, loops.add(d_v, j, part)

        start = jnp.zeros(queries.shape, wide), *carry
        d_q, *carry = lax.fori_loop(*loops.keys_of(i), body, start)
        return tuple(carry), (loops.blocks.scale * d_q).astype(q.dtype)

    by_query = (loops.queries(x) for x in (q, sums.swapaxes(1, 2)[..., None], d_out, delta))
    start = jnp.zeros(keys.shape, wide), jnp.zeros(values.shape, wide)
    (d_k, d_v), d_q = lax.scan(of_queries, start, (loops.numbers, *by_query))
    d_k, d_v = (x[:, :, : k.shape[1]].swapaxes(1, 2) for x in (loops.blocks.scale * d_k, d_v))
    return loops.joined(d_q), d_k.astype(k.dtype), d_v.astype(v.dtype)


@dataclass(frozen=True)
class _Loops:
    """Blocks of queries [batch, kv_heads, group, block, n] and of keys [batch, kv_heads, block, n].

    Attributes:
      ids: of the padded queries and keys, None without segments.
      seen: [blocks of queries] twice, the range of blocks of keys of their segments.
    """

    blocks: ScoreBlocks
    kv_heads: int
    offset: jax.Array | None
    ids: tuple[jax.Array, jax.Array] | None
    seen: tuple[jax.Array, jax.Array] | None

    @classmethod
    def of(
        cls,
        call: KernelCall,
        q: jax.Array,
        k: jax.Array,
        segments: Segments | None,
        offset: jax.Array | None,
    ) -> _Loops:
        lengths = q.shape[1], k.shape[1]
        sides = (-(-n // -(-n // LARGEST)) for n in lengths)
        blocks = ScoreBlocks(call.mask, call.scale, call.soft_cap, *lengths, *sides)
        seen = blocks.seen_by_queries(segments)
        if seen is not None:
            seen = seen[0].min(0), seen[1].max(0)
        return cls(blocks, k.shape[2], offset, blocks.ids(segments), seen)

    @property
    def numbers(self) -> jax.Array:
        return jnp.arange(self.blocks.blocks_q)

    def queries(self, x: jax.Array) -> jax.Array:
        """All blocks of [batch, seq, heads, n]."""
        more = self.blocks.blocks_q * self.blocks.block_q - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
        batch, _, _, n = x.shape
        x = x.reshape(batch, self.blocks.blocks_q, self.blocks.block_q, self.kv_heads, -1, n)
        return x.transpose(1, 0, 3, 4, 2, 5)

    def joined(self, x: jax.Array) -> jax.Array:
        """[batch, seq, heads, n], from all blocks."""
        blocks, batch, kv_heads, group, block, n = x.shape
        x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, blocks * block, kv_heads * group, n)
        return x[:, : self.blocks.seq]

    def keys(self, x: jax.Array) -> jax.Array:
        """[batch, kv_heads, full blocks, n], from [batch, kv_seq, kv_heads, n]."""
        more = self.blocks.blocks_k * self.blocks.block_k - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)

    def block(self, x: jax.Array, j: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self.blocks.block_k, self.blocks.block_k, axis=2)

    def add(self, x: jax.Array, j: Any, part: jax.Array) -> jax.Array:
        total = self.block(x, j) + part
        return lax.dynamic_update_slice_in_dim(x, total, j * self.blocks.block_k, axis=2)

    def keys_of(self, i: Any) -> tuple[Any, Any]:
        """The range of blocks of keys that a block of queries sees."""
        return self.blocks.keys_of(self.blocks.rows_of(i, self.offset), self.seen, i)

    def scores(self, q: jax.Array, keys: jax.Array, j: Any) -> tuple[jax.Array, Any]:
        return self.blocks.scores(_product("bhgqd,bhkd->bhgqk", q, self.block(keys, j)))

    def visible(self, x: jax.Array, hidden: float, i: Any, j: Any) -> jax.Array:
        rows, columns = self.blocks.rows_of(i, self.offset), self.blocks.columns_of(j)
        q_ids = k_ids = None
        if self.ids is not None:
            q_ids = lax.dynamic_slice_in_dim(self.ids[0], rows.start, rows.size, axis=1)
            k_ids = lax.dynamic_slice_in_dim(self.ids[1], columns.start, columns.size, axis=1)
            q_ids, k_ids = q_ids[:, None, None, :, None], k_ids[:, None, None, None]
        places = rows.places[:, None], columns.places[None]
        return self.blocks.visible(x, hidden, *places, q_ids, k_ids)


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(dims, a, b, preferred_element_type=wide)
