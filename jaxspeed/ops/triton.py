"""FlashAttention for GPUs as Pallas (Triton) kernels, for what cuDNN lacks, or does more slowly.

The online softmax of Dao et al. (arXiv:2205.14135) with the loops of FlashAttention-2
(arXiv:2307.08691): each program has one block of queries, or for the gradients of keys and values
one block of keys, and loops over the blocks of the other side that mask and segments leave.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops import gpu
from jaxspeed.ops.mask import KernelCall, Segments, computes_blocks
from jaxspeed.ops.score_blocks import HIDDEN, NEVER, ScoreBlocks, offset_operand, read_offset

AMPERE: gpu.Capability = (8, 0)  # XLA's Triton needs its tensor cores
# Scores of fewer queries or keys are no larger than other arrays, and not worth the time to trace.
SHORTEST = 128
STAGES = 2  # blocks in flight from memory
LOG2_E = math.log2(math.e)


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernels support these shapes and dtypes."""
    lengths = q.shape[1], k.shape[1]
    if min(lengths) < SHORTEST or q.shape[3] > 256:
        return False
    # Where a kernel is offered to one platform, the backward pass of others recomputes the scores:
    # those have none for incomplete blocks, so these are offered only where a GPU is meant.
    if any(length % SHORTEST for length in lengths) and not gpu.is_meant():
        return False
    supported = q.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) and gpu.is_at_least(AMPERE)
    return supported and _has_backend()


@functools.cache
def _has_backend() -> bool:
    """Whether JAX still has Pallas' backend for Triton, which is deprecated since 0.11."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return True


@functools.partial(jax.jit, static_argnums=0)
def forward(
    call: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    offset: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]) of one device's shard.

    Shapes as in `attention`; with an offset, query i is at position `offset + i`, and one that sees
    no key has sums of about `HIDDEN`. `interpret` runs it without a GPU, slowly.
    """
    seq, heads, head_dim = q.shape[1:]
    # In shared memory: a block of queries, and the stages of a block of keys and of values.
    blocks = ScoreBlocks.of(q, k, call, most=128, keys=0.5, tiles=1 + STAGES)
    q, k, v = blocks.rows(q), blocks.columns(k), blocks.columns(v)
    group = heads // k.shape[2]
    q_block, every = _block(blocks.block_q), _block(k.shape[1])
    kernel = _call(
        functools.partial(_forward_kernel, blocks=blocks),
        (blocks.blocks_q, heads),
        [q_block(_same), every(lambda i, h: (0, h // group)), every(lambda i, h: (0, h // group))],
        [q_block(_same), _sums(blocks.block_q)(lambda i, h: (h, i))],
        [(q.shape[1:], q.dtype), ((heads, q.shape[1]), jnp.float32)],
        call.interpret,
    )
    with computes_blocks(heads * blocks.computed(offset)):
        out, sums = jax.vmap(kernel, (0, 0, 0, None))(
            (q, k, v),
            blocks.ids(segments),
            blocks.seen_by_queries(segments),
            offset_operand(offset),
        )
    return out[:, :seq, :, :head_dim], sums[..., :seq]


@functools.partial(jax.jit, static_argnums=0)
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
    (seq, heads, head_dim), kv_seq = q.shape[1:], k.shape[1]
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    # In shared memory: two blocks of one side, and the stages of two of the other.
    blocks = ScoreBlocks.of(q, k, call, most=64, keys=1, tiles=2 + 2 * STAGES)
    q, d_out, k, v = blocks.rows(q), blocks.rows(d_out), blocks.columns(k), blocks.columns(v)
    more = q.shape[1] - seq
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, more)), constant_values=NEVER)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, more)))
    ids = blocks.ids(segments)
    kv_heads = k.shape[2]
    group = heads // kv_heads

    q_block, every = _block(blocks.block_q), _block(k.shape[1])
    row = _sums(blocks.block_q)(lambda i, h: (h, i))
    of_queries = _call(
        functools.partial(_d_query_kernel, blocks=blocks),
        (blocks.blocks_q, heads),
        [
            *(
                q_block(_same),
                every(lambda i, h: (0, h // group)),
                every(lambda i, h: (0, h // group)),
            ),
            *(q_block(_same), row, row),
        ],
        [q_block(_same)],
        [(q.shape[1:], q.dtype)],
        call.interpret,
    )
    k_block = _block(blocks.block_k)
    heads_of = _block(q.shape[1], group)(lambda j, h: (0, h))
    rows = _sums(q.shape[1], group)(lambda j, h: (h, 0))
    of_keys = _call(
        functools.partial(_d_key_kernel, blocks=blocks, group=group),
        (blocks.blocks_k, kv_heads),
        [heads_of, k_block(_same), k_block(_same), heads_of, rows, rows],
        [k_block(_same), k_block(_same)],
        [(k.shape[1:], k.dtype), (v.shape[1:], v.dtype)],
        call.interpret,
    )
    arrays = (q, k, v, d_out, sums, delta)
    with computes_blocks(heads * blocks.computed(offset)):
        over_batch = functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
        at = offset_operand(offset)
        (d_q,) = over_batch(of_queries)(arrays, ids, blocks.seen_by_queries(segments), at)
        d_k, d_v = over_batch(of_keys)(arrays, ids, blocks.seen_by_keys(segments), at)
    return d_q[:, :seq, :, :head_dim], *(x[:, :kv_seq, :, :head_dim] for x in (d_k, d_v))


# -- kernels ---------------------------------------------------------------------------------------


def _exp(x: jax.Array) -> jax.Array:
    """e^x, by the GPU's exp2.

    `x` is a difference of scores. Scores in base 2 would have the log-sum-exp rounded twice more,
    which doubles the error of gradients.
    """
    return jnp.exp2(LOG2_E * x)


# The kernels' first operands are the segment ids (queries', keys') and, for each block of the grid,
# the range of blocks of the other side that have a common segment; None without segments. Then
# comes the offset of the queries [1], or None.


def _forward_kernel(
    ids: Any,
    seen: Any,
    offset: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    blocks: Any,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import dot

    i = pl.program_id(0)
    q, rows = q_ref[...], blocks.rows_of(i, read_offset(offset))
    q_ids = None if ids is None else ids[0][pl.ds(rows.start, blocks.block_q)][:, None]

    def body(j: Any, carry: Any) -> Any:
        top, total, out = carry
        columns = blocks.columns_of(j)
        at = pl.ds(columns.start, blocks.block_k)
        k_ids = None if ids is None else ids[1][at][None]
        s, _ = blocks.scores(dot(q, k_ref[at, :], trans_b=True))
        s = blocks.visible(s, HIDDEN, rows.places[:, None], columns.places[None], q_ids, k_ids)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        shares = _exp(s - new_top[:, None])
        shrink = _exp(top - new_top)
        v = v_ref[at, :]
        part = dot(shares.astype(v.dtype), v)
        return new_top, total * shrink + jnp.sum(shares, axis=1), out * shrink[:, None] + part

    start = (
        jnp.full(blocks.block_q, HIDDEN, jnp.float32),
        jnp.zeros(blocks.block_q, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    first, stop = blocks.keys_of(rows, seen, i)
    top, total, out = lax.fori_loop(first, stop, body, start)
    total = jnp.where(total == 0, 1, total)  # no visible block
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = top + jnp.log(total)


def _d_query_kernel(
    ids: Any,
    seen: Any,
    offset: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    sums_ref: Any,
    delta_ref: Any,
    d_q_ref: Any,
    blocks: Any,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import dot

    i = pl.program_id(0)
    q, d_out, rows = q_ref[...], d_out_ref[...], blocks.rows_of(i, read_offset(offset))
    sums, delta = sums_ref[...], delta_ref[...]
    q_ids = None if ids is None else ids[0][pl.ds(rows.start, blocks.block_q)][:, None]

    def body(j: Any, d_q: Any) -> Any:
        columns = blocks.columns_of(j)
        at = pl.ds(columns.start, blocks.block_k)
        k_ids = None if ids is None else ids[1][at][None]
        k = k_ref[at, :]
        s, slope = blocks.scores(dot(q, k, trans_b=True))
        shares = _exp(s - sums[:, None])
        shares = blocks.visible(shares, 0, rows.places[:, None], columns.places[None], q_ids, k_ids)
        d_shares = dot(d_out, v_ref[at, :], trans_b=True)
        d_s = slope * shares * (d_shares - delta[:, None])
        return d_q + dot(d_s.astype(k.dtype), k)

    start = jnp.zeros(q.shape, jnp.float32)
    first, stop = blocks.keys_of(rows, seen, i)
    d_q = lax.fori_loop(first, stop, body, start)
    d_q_ref[...] = (blocks.scale * d_q).astype(d_q_ref.dtype)


def _d_key_kernel(
    ids: Any,
    seen: Any,
    offset: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    sums_ref: Any,
    delta_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
    blocks: Any,
    group: int,
) -> None:
    """Scores are [keys, queries] here, so that no product has a transposed computed operand."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas.triton import dot

    j = pl.program_id(0)
    k, v, columns = k_ref[...], v_ref[...], blocks.columns_of(j)
    k_ids = None if ids is None else ids[1][pl.ds(columns.start, blocks.block_k)][:, None]
    at_offset = read_offset(offset)
    first, stop = blocks.queries_of(columns, seen, j, at_offset)

    def body(n: Any, carry: Any) -> Any:
        d_k, d_v = carry
        rows = blocks.rows_of(first + lax.div(n, group), at_offset)
        head = lax.rem(n, group)
        at = pl.ds(rows.start, blocks.block_q)
        q_ids = None if ids is None else ids[0][at][None]
        q, d_out = q_ref[at, head, :], d_out_ref[at, head, :]
        s, slope = blocks.scores(dot(k, q, trans_b=True))
        shares = _exp(s - sums_ref[head, at][None])
        shares = blocks.visible(shares, 0, rows.places[None], columns.places[:, None], q_ids, k_ids)
        d_v += dot(shares.astype(d_out.dtype), d_out)
        d_shares = dot(v, d_out, trans_b=True)
        d_s = slope * shares * (d_shares - delta_ref[head, at][None])
        return d_k + dot(d_s.astype(q.dtype), q), d_v

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_k, d_v = lax.fori_loop(0, jnp.maximum(stop - first, 0) * group, body, start)
    d_k_ref[...] = (blocks.scale * d_k).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


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
) -> Callable[[Any, Any, Any, Any], Any]:
    """A kernel of (arrays, segment ids, ranges of blocks, offset) of one sequence."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def run(arrays: Any, ids: Any, seen: Any, offset: Any) -> Any:
        results = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        everything = jax.tree.map(
            lambda x: pl.BlockSpec(x.shape, lambda i, h: (0,)), (ids, seen, offset)
        )
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
        )(ids, seen, offset, *arrays)

    return run
