"""Splash attention, JAX's TPU kernel: scores stay in the core's VMEM."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspeed.ops.free_axes import device_kind
from jaxspeed.ops.mask import KernelCall, Mask, Segments, computes_blocks
from jaxspeed.ops.score_blocks import HIDDEN, ScoreBlocks
from jaxspeed.ops.two_passes import gradients_from

LANES = 128  # the width of a TPU register: blocks are multiples of it
_SAVED = "saved"  # checkpoint name of the kernel's result and sums, inside `backward`
BLOCKS = (512, 256, 128)  # larger ones reuse more of a block of keys; 512 fits every head_dim
# The first TPU for which libtpu 0.0.52 compiles matmuls of bf16 in a kernel: earlier ones get fp32.
MULTIPLIES_BF16 = 4
# Bytes of the tables of a kernel, which lie in the 1 MB of a core's scalar memory beside others.
TABLES = 3 << 18
_BLIND = -1e29  # the kernel's sums of queries that see no key are below it
_assumed: ContextVar[int | None] = ContextVar("tpu_generation", default=None)


@contextmanager
def assumed(generation: int | None) -> Iterator[None]:
    """Context in which attention is traced for an absent TPU; None: that of an outer context."""
    token = _assumed.set(generation or _assumed.get())
    try:
        yield
    finally:
        _assumed.reset(token)


def generation() -> int | None:
    """The generation of the TPU for which the program is traced (3 of v3); None if unknown."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    match = re.match(r"TPU v?(\d+)", device_kind())
    return int(match[1]) if match else None


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports these shapes and dtypes."""
    full_blocks = q.shape[1] % LANES == 0 and k.shape[1] % LANES == 0
    return full_blocks and q.dtype in (jnp.float32, jnp.bfloat16)


def forward(
    call: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    offset: jax.Array | None = None,
    computed: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]) of one device's shard.

    Shapes as in `attention`; with an offset, query i is at position `offset + i`, and one that sees
    no key has a result of 0 and sums of `HIDDEN`. `interpret` runs it without a TPU, slowly.
    `computed` is the number of blocks of scores, where it is not the most at any offset.
    """
    pieces = _Pieces.of(q, k, call.mask, offset)
    if pieces.count > 1:

        def of_piece(piece: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
            start, ids, q = piece
            segments_of_piece, computed = _with_queries(segments, ids), pieces.computed
            return forward(call, q, k, v, segments_of_piece, offset=start, computed=computed)

        operands = pieces.starts(offset), pieces.ids(segments), pieces.split(q, 1)
        out, sums = lax.map(of_piece, operands)
        return pieces.joined(out, 1), pieces.joined(sums, 2)

    dtype = q.dtype
    q, k, v = _operands(q, k, v)
    tables = _tables(q, k, segments, call.mask, offset)
    kernel = tables.kernel(call.interpret, save_residuals=True, attn_logits_soft_cap=call.soft_cap)
    with computes_blocks(computed or tables.computed):
        out, (sums,) = _over_batch(kernel, q, k, v, segments, call.scale)
    # Without a block to compute the kernel divides by 0. `HIDDEN` is far above its own value of a
    # hidden score, so that in the backward pass such a query has no share in any key.
    if offset is not None:
        blind = sums < _BLIND
        out, sums = jnp.where(blind[..., None], 0, out), jnp.where(blind, HIDDEN, sums)
    # The kernel returns each sum 128 times. Without a barrier XLA fuses the slice of one into the
    # backward pass, and so holds all until then: with heads of 128, twice the bytes of `out`.
    out, sums = jax.lax.optimization_barrier((out.astype(dtype), sums))
    return out.swapaxes(1, 2), sums


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
    computed: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from the results of `forward`."""
    pieces = _Pieces.of(q, k, call.mask, offset)
    if pieces.count > 1:

        def step(totals: list[jax.Array], piece: Any) -> tuple[list[jax.Array], jax.Array]:
            start, ids, q, *rest = piece
            segments_of_piece = _with_queries(segments, ids)
            of_piece = {"offset": start, "computed": pieces.computed}
            dq, *terms = backward(call, q, k, v, segments_of_piece, *rest, **of_piece)
            return [a + x.astype(a.dtype) for a, x in zip(totals, terms, strict=True)], dq

        of_queries = [pieces.split(x, dim) for x, dim in ((q, 1), (out, 1), (sums, 2), (d_out, 1))]
        operands = pieces.starts(offset), pieces.ids(segments), *of_queries
        (dk, dv), dq = lax.scan(step, [jnp.zeros(x.shape, jnp.float32) for x in (k, v)], operands)
        return pieces.joined(dq, 1), dk.astype(k.dtype), dv.astype(v.dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = {"residual_checkpoint_name": _SAVED, "attn_logits_soft_cap": call.soft_cap}
        kernel = tables.kernel(call.interpret, **options)
        return _over_batch(kernel, q, k, v, segments, call.scale)

    dtype = q.dtype
    q, k, v, out, d_out = _operands(q, k, v, out, d_out)
    tables = _tables(q, k, segments, call.mask, offset)
    saving = jax.checkpoint(attend, policy=jax.checkpoint_policies.save_only_these_names(_SAVED))
    with computes_blocks(computed or tables.computed):
        saved = out.swapaxes(1, 2), sums
        dq, dk, dv = gradients_from(saving, (q, k, v), saved, d_out.swapaxes(1, 2))
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def _operands(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays in the dtype of the kernel's matmuls."""
    chip = generation()
    if chip is None or chip >= MULTIPLIES_BF16:
        return arrays
    return tuple(x.astype(jnp.float32) for x in arrays)


@dataclass(frozen=True)
class _Pieces:
    """Queries in consecutive pieces, of which a kernel's tables fit in scalar memory.

    Attributes:
      computed: blocks of scores that a piece computes, in the mean.
    """

    count: int
    size: int
    computed: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, mask: Mask, offset: jax.Array | None) -> _Pieces:
        blocks = _blocks(q, k, mask)
        steps = mask.most_beside(blocks.block_q, blocks.block_k, blocks.blocks_k)
        most = max(TABLES // (3 * steps), 1)  # 16 bits for a block and 8 for its state
        fewest = -(-blocks.blocks_q // most)
        count = next(n for n in range(fewest, blocks.blocks_q + 1) if blocks.blocks_q % n == 0)
        return cls(count, q.shape[1] // count, -(-blocks.computed(offset) // count))

    def starts(self, offset: jax.Array | None) -> jax.Array:
        """The positions of their first queries."""
        return jnp.arange(self.count) * self.size + (0 if offset is None else offset)

    def split(self, x: jax.Array, dim: int) -> jax.Array:
        """[pieces, ...] of an array with a dim of queries."""
        shape = (*x.shape[:dim], self.count, self.size, *x.shape[dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    def joined(self, x: jax.Array, dim: int) -> jax.Array:
        moved = jnp.moveaxis(x, 0, dim)
        return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])

    def ids(self, segments: Segments | None) -> jax.Array | None:
        return None if segments is None else self.split(segments.q, 1)


def _with_queries(segments: Segments | None, ids: jax.Array) -> Segments | None:
    return None if segments is None else Segments(ids, segments.kv)


def _blocks(q: jax.Array, k: jax.Array, mask: Mask) -> ScoreBlocks:
    sizes = (next(b for b in BLOCKS if x.shape[1] % b == 0) for x in (q, k))
    return ScoreBlocks(mask, 1.0, None, q.shape[1], k.shape[1], *sizes)


def _tables(
    q: jax.Array, k: jax.Array, segments: Segments | None, mask: Mask, offset: jax.Array | None
) -> _Tables:
    blocks = _blocks(q, k, mask)
    if offset is None:
        return _Tables.without_offset(blocks)
    return _Tables.of(blocks, offset, segments)


@functools.cache
def _mask_function(sides: tuple[int | None, int]) -> Callable[..., Any]:
    """Of (positions of queries, of keys): visible keys to the (left, right) of a query."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.LocalMask((1, 1), sides, 0).mask_function  # independent of the shape


@dataclass(frozen=True)
class _Tables:
    """Which block of the other side each step of the kernels' grids loads, and which compute.

    Splash's own are built by Python loops over all blocks, in 57.6 s for 131,072 tokens, and for
    positions that are known. Here they are formulas of the offset; without one, equal to its own.
    With one, segments count too: what no id of any sample can meet is neither loaded nor computed.

    Attributes:
      by_queries, by_keys: [1, blocks of queries, steps] of the forward pass and dq, [1, steps,
        blocks of keys] of dk and dv: (the block that a step loads, 0: nothing to compute | 1: part
        of the block is visible | 2: all of it).
      positions: of the queries [seq], None if they see every key.
    """

    blocks: ScoreBlocks
    by_queries: tuple[Any, Any]
    by_keys: tuple[Any, Any]
    positions: Any
    computed: int

    @classmethod
    @functools.lru_cache(maxsize=12)  # as many as splash has, and layers share
    def without_offset(cls, blocks: ScoreBlocks) -> _Tables:
        return cls.of(blocks, None, None)

    @classmethod
    def of(
        cls, blocks: ScoreBlocks, offset: jax.Array | None, segments: Segments | None
    ) -> _Tables:
        mask, seq, kv_seq = blocks.mask, blocks.seq, blocks.kv_seq
        size_q, size_k = blocks.block_q, blocks.block_k
        count_q, count_k = blocks.blocks_q, blocks.blocks_k
        start: Any = 0 if offset is None else offset
        xp: Any = np if offset is None else jnp
        overlap = None if segments is None else blocks.overlap(segments).any(0)

        def table(first: Any, count: Any, steps: int, of_keys: bool) -> tuple[Any, Any]:
            """Of the blocks from `first` on for each of the other side, as [other side, steps]."""
            step = xp.arange(steps)
            if of_keys:  # empty steps come first
                step = step - (steps - count[:, None])
            block, runs = first[:, None] + step, (step >= 0) & (step < count[:, None])
            other = xp.arange(len(first))[:, None]
            i, j = (block, other) if of_keys else (other, block)
            rows, columns = start + size_q * i, size_k * j
            part: Any = False
            if mask.causal:
                part = columns + size_k - 1 > rows
            if mask.window is not None:
                part |= rows + size_q - 1 - columns >= mask.window
                part |= columns + size_k - 1 - rows >= mask.window
            if overlap is not None:
                near_i, near_j = jnp.clip(i, 0, count_q - 1), jnp.clip(j, 0, count_k - 1)
                runs &= overlap[near_i, near_j]
            state = xp.where(runs, 2 - part, 0)
            if offset is None:
                block = np.where(runs, block, 0)
                largest = block.max()
            else:  # the next block that is computed, else the last
                largest = max(count_q, count_k)
                later = lax.cummin(jnp.where(runs, block, largest), axis=1, reverse=True)
                before = lax.cummax(jnp.where(runs, block, 0), axis=1)
                block = jnp.where(later < largest, later, before)
            fits = (t for t in (np.int8, np.int16, np.int32) if largest <= np.iinfo(t).max)
            tables = block.astype(next(fits)), state.astype(np.int8)
            return tuple(xp.stack([x.T if of_keys else x]) for x in tables)

        def ranges(lowest: Any, highest: Any, size: int) -> tuple[Any, Any]:
            first = lowest // size
            return first, xp.where(highest >= lowest, highest // size - first + 1, 0)

        rows, columns = size_q * xp.arange(count_q) + start, size_k * xp.arange(count_k) - start
        keys = ranges(*mask.visible(rows, rows + size_q - 1, kv_seq), size_k)
        queries = ranges(*mask.seen_by(columns, columns + size_k - 1, seq), size_q)
        if offset is None:
            steps_k, steps_q = keys[1].max(), queries[1].max()
        else:
            steps_k = mask.most_beside(size_q, size_k, count_k)
            steps_q = mask.most_beside(size_k, size_q, count_q)
        positions = xp.arange(seq, dtype=np.int32) + start if mask.hides else None
        return cls(
            blocks,
            table(*keys, steps_k, of_keys=False),
            table(*queries, steps_q, of_keys=True),
            positions,
            blocks.computed(offset),
        )

    def kernel(self, interpret: bool, **options: Any) -> Any:
        # Import Pallas lazily: that takes 0.2 s, and on a CPU it is not used.
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel,
            splash_attention_mask_info,
        )

        mask, block_q, block_kv = self.blocks.mask, self.blocks.block_q, self.blocks.block_k
        sides = mask.sides() or ((None, 0) if mask.causal else None)
        info = splash_attention_mask_info.MaskInfo
        tables = (
            info(block, None, state, None, self.positions)
            for block, state in (self.by_queries, self.by_queries, self.by_keys)
        )
        return splash_attention_kernel.SplashAttentionKernel(
            *jax.tree.map(jnp.asarray, tuple(tables)),
            block_sizes=splash_attention_kernel.BlockSizes(
                block_q=block_q,
                block_kv=block_kv,
                block_q_dkv=block_q,
                block_kv_dkv=block_kv,
                block_q_dq=block_q,
                block_kv_dq=block_kv,
            ),
            is_mqa=False,
            mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
            mask_function=None if sides is None else _mask_function(sides),
            interpret=interpret,
            **{"save_residuals": False, "residual_checkpoint_name": None} | options,
        )


def _over_batch(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    scale: float,
) -> Any:
    """Adapt the kernel, which has no scale and no batch dim, and heads before the sequence."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    ids = None if segments is None else splash.SegmentIds(segments.q, segments.kv)
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)), ids)
