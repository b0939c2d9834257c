"""FlashAttention for GPUs as Pallas (Triton) kernels, for what cuDNN does not support.

The online softmax of Dao et al. (arXiv:2205.14135) with the loops of FlashAttention-2
(arXiv:2307.08691): each program has one block of queries, or for the gradients of keys and values
one block of keys, and loops over the blocks of the other side that mask and segments leave.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops import gpu
from jaxspeed.ops.mask import Mask, Segments, computes_blocks

AMPERE: gpu.Capability = (8, 0)  # XLA's Triton needs its tensor cores
# Scores of fewer queries or keys are no larger than other arrays, and not worth the time to trace.
SHORTEST = 128
SMALLEST = 16  # the least side of a product on tensor cores
SHARED = 96 * 1024  # bytes of shared memory that a program may use on every GPU since Ampere
STAGES = 2  # blocks in flight from memory
_HIDDEN = -1e30  # a hidden score
_NEVER = 1e30  # a log-sum-exp for which every share is 0
_LOG2_E = math.log2(math.e)


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernels support these shapes and dtypes."""
    if min(q.shape[1], k.shape[1]) < SHORTEST or q.shape[3] > 256:
        return False
    return q.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) and gpu.is_at_least(AMPERE)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]) of one device's shard.

    Shapes as in `attention`. `interpret` runs it without a GPU, slowly.
    """
    seq, heads, head_dim = q.shape[1:]
    # In shared memory: a block of queries, and the stages of a block of keys and of values.
    form = _Form.of(q, k, mask, scale, soft_cap, most=128, keys=0.5, blocks=1 + STAGES)
    q, k, v = form.rows(q), form.columns(k), form.columns(v)
    group = heads // k.shape[2]
    one, every = _block(form.block_q), _block(k.shape[1])
    kernel = _call(
        functools.partial(_forward_kernel, form=form),
        (form.blocks_q, heads),
        [one(_same), every(lambda i, h: (0, h // group)), every(lambda i, h: (0, h // group))],
        [one(_same), _sums(form.block_q)(lambda i, h: (h, i))],
        [(q.shape[1:], q.dtype), ((heads, q.shape[1]), jnp.float32)],
        interpret,
    )
    with computes_blocks(heads * form.computed):
        out, sums = jax.vmap(kernel)((q, k, v), form.ids(segments), form.seen_by_queries(segments))
    return out[:, :seq, :, :head_dim], sums[..., :seq]


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""
    (seq, heads, head_dim), kv_seq = q.shape[1:], k.shape[1]
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    # In shared memory: two blocks of one side, and the stages of two of the other.
    form = _Form.of(q, k, mask, scale, soft_cap, most=64, keys=1, blocks=2 + 2 * STAGES)
    q, d_out, k, v = form.rows(q), form.rows(d_out), form.columns(k), form.columns(v)
    more = q.shape[1] - seq
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, more)), constant_values=_NEVER)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, more)))
    ids = form.ids(segments)
    kv_heads = k.shape[2]
    group = heads // kv_heads

    one, every = _block(form.block_q), _block(k.shape[1])
    row = _sums(form.block_q)(lambda i, h: (h, i))
    of_queries = _call(
        functools.partial(_d_query_kernel, form=form),
        (form.blocks_q, heads),
        [
            *(one(_same), every(lambda i, h: (0, h // group)), every(lambda i, h: (0, h // group))),
            *(one(_same), row, row),
        ],
        [one(_same)],
        [(q.shape[1:], q.dtype)],
        interpret,
    )
    one = _block(form.block_k)
    heads_of = _block(q.shape[1], group)(lambda j, h: (0, h))
    rows = _sums(q.shape[1], group)(lambda j, h: (h, 0))
    of_keys = _call(
        functools.partial(_d_key_kernel, form=form, group=group),
        (form.blocks_k, kv_heads),
        [heads_of, one(_same), one(_same), heads_of, rows, rows],
        [one(_same), one(_same)],
        [(k.shape[1:], k.dtype), (v.shape[1:], v.dtype)],
        interpret,
    )
    given = (q, k, v, d_out, sums, delta)
    with computes_blocks(heads * form.computed):
        (d_q,) = jax.vmap(of_queries)(given, ids, form.seen_by_queries(segments))
        d_k, d_v = jax.vmap(of_keys)(given, ids, form.seen_by_keys(segments))
    return d_q[:, :seq, :, :head_dim], *(x[:, :kv_seq, :, :head_dim] for x in (d_k, d_v))


# -- kernels ---------------------------------------------------------------------------------------

# Their first two operands are the segment ids (queries', keys') and, for each block of the grid,
# the range of blocks of the other side that have a common segment; None without segments. Scores
# are in units of ln 2, for exp2.


def _forward_kernel(
    ids: Any, seen: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, sums_ref: Any, form: Any
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import dot

    i = pl.program_id(0)
    q, rows = q_ref[...], form.rows_of(i)
    q_ids = None if ids is None else ids[0][pl.ds(rows.start, form.block_q)][:, None]

    def body(j: Any, carry: Any) -> Any:
        top, total, out = carry
        columns = form.columns_of(j)
        at = pl.ds(columns.start, form.block_k)
        k_ids = None if ids is None else ids[1][at][None]
        s, _ = form.scores(dot(q, k_ref[at, :], trans_b=True))
        shown = form.shown(rows.places[:, None], columns.places[None], q_ids, k_ids)
        s = s if shown is None else jnp.where(shown, s, _HIDDEN)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        shares = jnp.exp2(s - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        v = v_ref[at, :]
        part = dot(shares.astype(v.dtype), v)
        return new_top, total * shrink + jnp.sum(shares, axis=1), out * shrink[:, None] + part

    start = (
        jnp.full(form.block_q, _HIDDEN, jnp.float32),
        jnp.zeros(form.block_q, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    top, total, out = lax.fori_loop(*form.keys_of(rows, seen, i), body, start)
    total = jnp.where(total == 0, 1, total)  # no visible block
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = top / _LOG2_E + jnp.log(total)


def _d_query_kernel(
    ids: Any,
    seen: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    sums_ref: Any,
    delta_ref: Any,
    d_q_ref: Any,
    form: Any,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import dot

    i = pl.program_id(0)
    q, d_out, rows = q_ref[...], d_out_ref[...], form.rows_of(i)
    sums, delta = sums_ref[...] * _LOG2_E, delta_ref[...]
    q_ids = None if ids is None else ids[0][pl.ds(rows.start, form.block_q)][:, None]

    def body(j: Any, d_q: Any) -> Any:
        columns = form.columns_of(j)
        at = pl.ds(columns.start, form.block_k)
        k_ids = None if ids is None else ids[1][at][None]
        k = k_ref[at, :]
        s, slope = form.scores(dot(q, k, trans_b=True))
        shares = jnp.exp2(s - sums[:, None])
        shown = form.shown(rows.places[:, None], columns.places[None], q_ids, k_ids)
        shares = shares if shown is None else jnp.where(shown, shares, 0)
        d_shares = dot(d_out, v_ref[at, :], trans_b=True)
        d_s = slope * shares * (d_shares - delta[:, None])
        return d_q + dot(d_s.astype(k.dtype), k)

    start = jnp.zeros(q.shape, jnp.float32)
    d_q = lax.fori_loop(*form.keys_of(rows, seen, i), body, start)
    d_q_ref[...] = (form.scale * d_q).astype(d_q_ref.dtype)


def _d_key_kernel(
    ids: Any,
    seen: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    sums_ref: Any,
    delta_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
    form: Any,
    group: int,
) -> None:
    """Scores are [keys, queries] here, so that no product has a transposed computed operand."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import dot

    j = pl.program_id(0)
    k, v, columns = k_ref[...], v_ref[...], form.columns_of(j)
    k_ids = None if ids is None else ids[1][pl.ds(columns.start, form.block_k)][:, None]
    first, stop = form.queries_of(columns, seen, j)

    def body(n: Any, carry: Any) -> Any:
        d_k, d_v = carry
        rows, head = form.rows_of(first + lax.div(n, group)), lax.rem(n, group)
        at = pl.ds(rows.start, form.block_q)
        q_ids = None if ids is None else ids[0][at][None]
        q, d_out = q_ref[at, head, :], d_out_ref[at, head, :]
        s, slope = form.scores(dot(k, q, trans_b=True))
        shares = jnp.exp2(s - (sums_ref[head, at] * _LOG2_E)[None])
        shown = form.shown(rows.places[None], columns.places[:, None], q_ids, k_ids)
        shares = shares if shown is None else jnp.where(shown, shares, 0)
        d_v += dot(shares.astype(d_out.dtype), d_out)
        d_shares = dot(v, d_out, trans_b=True)
        d_s = slope * shares * (d_shares - delta_ref[head, at][None])
        return d_k + dot(d_s.astype(q.dtype), q), d_v

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_k, d_v = lax.fori_loop(0, jnp.maximum(stop - first, 0) * group, body, start)
    d_k_ref[...] = (form.scale * d_k).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


@dataclass(frozen=True)
class _Block:
    """Positions of one block of queries or keys."""

    start: Any
    size: int

    @property
    def last(self) -> Any:
        return self.start + self.size - 1

    @property
    def places(self) -> jax.Array:
        return self.start + jnp.arange(self.size)


@dataclass(frozen=True)
class _Form:
    """The static part of a call: mask, scores, sizes of blocks."""

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
        mask: Mask,
        scale: float,
        soft_cap: float | None,
        *,
        most: int,
        keys: float,
        blocks: int,
    ) -> _Form:
        """Blocks of queries of up to `most`, of keys `keys` times as many.

        As many bytes as `blocks` of queries fit in shared memory.
        """
        row = max(_power_of_2(q.shape[3]), SMALLEST) * q.dtype.itemsize
        block = min(most, 1 << (SHARED // (blocks * row)).bit_length() - 1)
        sides = (block, int(block * keys))
        lengths = (q.shape[1], k.shape[1])
        block_q, block_k = (
            max(SMALLEST, min(side, _power_of_2(length))) for side, length in zip(sides, lengths)
        )
        return cls(mask, scale, soft_cap, *lengths, block_q, block_k)

    @property
    def blocks_q(self) -> int:
        return -(-self.seq // self.block_q)

    @property
    def blocks_k(self) -> int:
        return -(-self.kv_seq // self.block_k)

    @property
    def computed(self) -> int:
        """Blocks of the scores of one head that the mask leaves."""
        return self.mask.blocks(self.seq, self.kv_seq, self.block_q, self.block_k)[0]

    def rows(self, x: jax.Array) -> jax.Array:
        """Queries [batch, seq, heads, head_dim], padded to full blocks."""
        return _padded(x, self.blocks_q * self.block_q)

    def columns(self, x: jax.Array) -> jax.Array:
        return _padded(x, self.blocks_k * self.block_k)

    def rows_of(self, i: Any) -> _Block:
        return _Block(i * self.block_q, self.block_q)

    def columns_of(self, j: Any) -> _Block:
        return _Block(j * self.block_k, self.block_k)

    def scores(self, products: jax.Array) -> tuple[jax.Array, Any]:
        """(scores in units of ln 2, the derivative of their soft cap)."""
        s = self.scale * products
        if self.soft_cap is None:
            return _LOG2_E * s, 1.0
        capped = jnp.tanh(s / self.soft_cap)
        return _LOG2_E * self.soft_cap * capped, 1 - capped * capped

    def shown(self, rows: Any, columns: Any, q_ids: Any, k_ids: Any) -> jax.Array | None:
        """Where a query sees a key, broadcast; None: everywhere."""
        parts = []
        if self.mask.causal:
            parts.append(columns <= rows)
        if self.mask.window is not None:
            parts.append(jnp.abs(rows - columns) < self.mask.window)
        if self.kv_seq % self.block_k:
            parts.append(columns + 0 * rows < self.kv_seq)
        if q_ids is not None:
            parts.append(q_ids == k_ids)
        return functools.reduce(jnp.logical_and, parts) if parts else None

    def keys_of(self, rows: _Block, seen: Any, i: Any) -> tuple[Any, Any]:
        """The range of blocks of keys that a block of queries sees."""
        low, high = _window(rows, self.mask.window, self.kv_seq)
        if self.mask.causal:
            high = jnp.minimum(high, rows.last)
        return _range(low, high, self.block_k, seen, i)

    def queries_of(self, columns: _Block, seen: Any, j: Any) -> tuple[Any, Any]:
        """The range of blocks of queries that see a block of keys."""
        low, high = _window(columns, self.mask.window, self.seq)
        if self.mask.causal:
            low = jnp.maximum(low, columns.start)
        return _range(low, high, self.block_q, seen, j)

    # Segments: a query's padding has no segment of a key's.

    def ids(self, segments: Segments | None) -> Any:
        if segments is None:
            return None
        more_q, more_k = self.blocks_q * self.block_q, self.blocks_k * self.block_k
        q, kv = segments.q.astype(jnp.int32), segments.kv.astype(jnp.int32)
        return _edged(q, more_q), _edged(kv, more_k)

    def seen_by_queries(self, segments: Segments | None) -> Any:
        """[batch, blocks of queries] twice: the range of blocks of keys of their segments."""
        return None if segments is None else _ranges(self._overlap(segments))

    def seen_by_keys(self, segments: Segments | None) -> Any:
        return None if segments is None else _ranges(self._overlap(segments).swapaxes(1, 2))

    def _overlap(self, segments: Segments) -> jax.Array:
        """[batch, blocks of queries, blocks of keys], False where no id can be equal."""
        q, kv = self.ids(segments)
        q = q.reshape(len(q), self.blocks_q, self.block_q)
        kv = kv.reshape(len(kv), self.blocks_k, self.block_k)
        above = q.max(-1)[:, :, None] >= kv.min(-1)[:, None]
        return above & (q.min(-1)[:, :, None] <= kv.max(-1)[:, None])


def _window(block: _Block, window: int | None, length: int) -> tuple[Any, Any]:
    """(first, last) position of the other side within the window of a block."""
    if window is None:
        return 0, length - 1
    low = jnp.maximum(block.start - window + 1, 0)
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


# -- calls -----------------------------------------------------------------------------------------


def _same(i: Any, h: Any) -> tuple[Any, Any]:
    return i, h


def _block(size: int, heads: int | None = None) -> Callable[[Any], Any]:
    """A spec of an array [seq, heads, head_dim], at (block of seq, head) by the grid."""

    def spec(at: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
        return lambda pl, x: pl.BlockSpec((size, heads, x.shape[-1]), lambda i, h: (*at(i, h), 0))

    return spec


def _sums(size: int, heads: int | None = None) -> Callable[[Any], Any]:
    """A spec of an array [heads, seq]."""

    def spec(at: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
        return lambda pl, x: pl.BlockSpec((heads, size), at)

    return spec


def _call(
    kernel: Any, grid: Any, ins: Any, outs: Any, shapes: Any, interpret: bool
) -> Callable[[Any, Any, Any], Any]:
    """A kernel of (arrays, segment ids, ranges of blocks) of one sequence."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def run(arrays: Any, ids: Any, seen: Any) -> Any:
        results = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        everything = jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda i, h: (0,)), (ids, seen))
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[*everything, *(spec(pl, x) for spec, x in zip(ins, arrays, strict=True))],
            out_specs=[spec(pl, x) for spec, x in zip(outs, results, strict=True)],
            out_shape=results,
            compiler_params=triton.CompilerParams(
                num_warps=4 if arrays[0].shape[-1] <= 64 else 8, num_stages=STAGES
            ),
            interpret=interpret,
        )(ids, seen, *arrays)

    return run
