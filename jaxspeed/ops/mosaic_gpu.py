"""FlashAttention for Hopper GPUs as Pallas (Mosaic GPU) kernels, in place of those of `triton`.

The loops are those of `triton`. As in FlashAttention-3 (arXiv:2407.08608) the warpgroups of a
program have roles: two multiply, each for half the rows of the program's block, and one copies the
blocks of the other side to shared memory ahead of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops import gpu
from jaxspeed.ops.mask import KernelCall, Segments, computes_flops
from jaxspeed.ops.score_blocks import (
    HIDDEN,
    NEVER,
    BlockPlaces,
    ScoreBlocks,
    offset_operand,
    read_offset,
)

HOPPER = 9  # the compute capability's major number: no other GPU has a warpgroup's products
MOST_HEAD_DIM = 128  # the gradients of a block of keys and values are in registers
TILE = 64  # rows of a warpgroup's product, to which head dims are padded
COPYING = 2  # the number of the warpgroup that copies; those before it multiply
BLOCK = COPYING * TILE  # rows of a program
STAGES = 2  # blocks in flight from memory
LOG2_E = math.log2(math.e)
_GRID = ("sequence", "block", "head")
_WARPGROUP = "warpgroup"


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernels support these shapes and dtypes on the GPU that is meant."""
    if min(q.shape[1], k.shape[1]) < BLOCK or q.shape[3] > MOST_HEAD_DIM:
        return False
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    return gpu.is_meant() and gpu.has_major(HOPPER) and not gpu.miscompiles_masks()


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

    Shapes and the offset as in `triton`. `interpret` simulates a GPU, slowly, and supports fp32.
    """
    (batch, seq, heads, head_dim), kv_seq = q.shape, k.shape[1]
    blocks = ScoreBlocks(call.mask, call.scale, call.soft_cap, seq, kv_seq, BLOCK, BLOCK)
    q, k, v = (_padded(x) for x in (q, k, v))
    kernel = _call(
        functools.partial(_forward_kernel, blocks=blocks, group=heads // k.shape[2]),
        (batch, blocks.blocks_q, heads),
        [(q.shape, q.dtype), ((batch, heads, q.shape[1]), jnp.float32)],
        lambda: [
            *(_own(q), _shared((COPYING, TILE), jnp.float32), _arrived(1)),
            *(_ring(BLOCK, k, segments), _ring(BLOCK, v, None)),
        ],
        call.soft_cap,
        call.interpret,
    )
    with computes_flops(2 * batch * heads * _product_flops(blocks, q, offset)):
        out, sums = kernel(
            blocks.ids(segments), blocks.seen_by_queries(segments), offset_operand(offset), q, k, v
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
    (batch, seq, heads, head_dim), (kv_seq, kv_heads) = q.shape, k.shape[1:3]
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    q, k, v, d_out = (_padded(x) for x in (q, k, v, d_out))
    more = ((0, 0), (0, 0), (0, q.shape[1] - seq))
    sums, delta = jnp.pad(sums, more, constant_values=NEVER), jnp.pad(delta, more)
    arrays, group = (q, k, v, d_out, sums, delta), heads // kv_heads
    other = TILE  # a wider block of scores and one of their gradients do not fit in registers

    blocks = ScoreBlocks(call.mask, call.scale, call.soft_cap, seq, kv_seq, BLOCK, other)
    kernel = _call(
        functools.partial(_d_query_kernel, blocks=blocks, group=group),
        (batch, blocks.blocks_q, heads),
        [(q.shape, q.dtype)],
        lambda: [
            *(_own(q), _own(d_out), _arrived(2)),
            *(_ring(other, k, segments), _ring(other, v, None)),
        ],
        call.soft_cap,
        call.interpret,
    )
    with computes_flops(3 * batch * heads * _product_flops(blocks, q, offset)):
        (d_q,) = kernel(
            blocks.ids(segments), blocks.seen_by_queries(segments), offset_operand(offset), *arrays
        )

    blocks = ScoreBlocks(call.mask, call.scale, call.soft_cap, seq, kv_seq, other, BLOCK)
    kernel = _call(
        functools.partial(_d_key_kernel, blocks=blocks, group=group),
        (batch, blocks.blocks_k, kv_heads),
        [(k.shape, k.dtype), (v.shape, v.dtype)],
        lambda: [
            *(_own(k), _own(v), _arrived(2)),
            *(_ring(other, q, segments, sums), _ring(other, d_out, None, delta)),
        ],
        call.soft_cap,
        call.interpret,
    )
    with computes_flops(4 * batch * heads * _product_flops(blocks, q, offset)):
        d_k, d_v = kernel(
            blocks.ids(segments), blocks.seen_by_keys(segments), offset_operand(offset), *arrays
        )
    return d_q[:, :seq, :, :head_dim], *(x[:, :kv_seq, :, :head_dim] for x in (d_k, d_v))


def _product_flops(blocks: ScoreBlocks, q: jax.Array, offset: jax.Array | None) -> int:
    """Of one product, of all blocks of scores of one head."""
    return 2 * blocks.computed(offset) * blocks.block_q * blocks.block_k * q.shape[3]


def _padded(x: jax.Array) -> jax.Array:
    """[batch, full blocks, heads, full tiles]."""
    more = -x.shape[1] % BLOCK, -x.shape[3] % TILE
    return jnp.pad(x, ((0, 0), (0, more[0]), (0, 0), (0, more[1])))


# -- kernels ---------------------------------------------------------------------------------------

# The kernels' first operands are those of `triton`, here of all sequences. The last are in
# shared memory: what each multiplying warpgroup has of its own, with barriers, and the rings.


class _Ring(NamedTuple):
    """Blocks of arrays on their way through shared memory.

    Attributes:
      buffers: of each array [STAGES, block, ...].
      arrived, released: barriers of each stage, for the copies and for the warpgroups that read.
    """

    buffers: tuple[Any, ...]
    arrived: Any
    released: Any


def _forward_kernel(
    ids: Any,
    seen: Any,
    offset: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    own_q: Any,
    own_sums: Any,
    own_arrived: Any,
    ring_k: _Ring,
    ring_v: _Ring,
    *,
    blocks: ScoreBlocks,
    group: int,
    interpret: bool,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, i, head = map(lax.axis_index, _GRID)
    warpgroup = lax.axis_index(_WARPGROUP)
    block = blocks.rows_of(i, read_offset(offset))
    first, stop = blocks.keys_of(block, _of(seen, batch), i)

    @pl.when(warpgroup == COPYING)
    def copy() -> None:
        kv_head = lax.div(head, group)

        def place(n: Any) -> tuple[Any, Any]:
            return batch, _slice(blocks.columns_of(first + n))

        def keys(n: Any) -> list[Any]:
            return [k_ref.at[*place(n), kv_head], *([] if ids is None else [ids[1].at[place(n)]])]

        _copy_ahead(
            stop - first, (ring_k, keys), (ring_v, lambda n: [v_ref.at[*place(n), kv_head]])
        )

    @pl.when(warpgroup < COPYING)
    def multiply() -> None:
        plgpu.set_max_registers(232, action="increase")
        rows, arrived = _part(block, warpgroup), own_arrived.at[warpgroup]
        at = batch, _slice(rows), head
        q = own_q.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[at], q, arrived)
        q_ids = None if ids is None else _load(ids[0].at[at[:2]], 0)
        plgpu.barrier_wait(arrived)

        def body(n: Any, carry: Any) -> Any:
            top, total, out = carry
            columns = blocks.columns_of(first + n)
            k, *k_ids = _await(ring_k, n)
            s, _ = blocks.scores(_product(q, k.transpose((1, 0))))
            ids_of_keys = _load(k_ids[0], 1) if k_ids else None
            _release(ring_k, n, interpret)
            s = _visible(blocks, s, HIDDEN, rows, columns, q_ids, ids_of_keys, 0)
            new_top = jnp.maximum(top, _in_registers(jnp.max(s, axis=1), 0))
            shares = _exp(s - _along(new_top, s, 0))
            shrink = _exp(top - new_top)
            total = total * shrink + _in_registers(jnp.sum(shares, axis=1), 0)
            (v,) = _await(ring_v, n)
            out = out * _along(shrink, out, 0)
            out = _add_product(out, shares.astype(v.dtype), v, interpret)
            _release(ring_v, n, interpret)
            return new_top, total, out

        start = _full((TILE,), HIDDEN), _full((TILE,), 0), _full(q.shape, 0)
        top, total, out = lax.fori_loop(0, stop - first, body, start)
        total = jnp.where(total == 0, 1.0, total)  # no visible block
        q[...] = (out / _along(total, out, 0)).astype(q.dtype)
        own_sums.at[warpgroup][...] = top + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out_ref.at[at])
        plgpu.copy_smem_to_gmem(own_sums.at[warpgroup], sums_ref.at[batch, head, _slice(rows)])
        plgpu.wait_smem_to_gmem(0)


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
    own_q: Any,
    own_d_out: Any,
    own_arrived: Any,
    ring_k: _Ring,
    ring_v: _Ring,
    *,
    blocks: ScoreBlocks,
    group: int,
    interpret: bool,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, i, head = map(lax.axis_index, _GRID)
    warpgroup = lax.axis_index(_WARPGROUP)
    block = blocks.rows_of(i, read_offset(offset))
    first, stop = blocks.keys_of(block, _of(seen, batch), i)

    @pl.when(warpgroup == COPYING)
    def copy() -> None:
        kv_head = lax.div(head, group)

        def place(n: Any) -> tuple[Any, Any]:
            return batch, _slice(blocks.columns_of(first + n))

        def keys(n: Any) -> list[Any]:
            return [k_ref.at[*place(n), kv_head], *([] if ids is None else [ids[1].at[place(n)]])]

        _copy_ahead(
            stop - first, (ring_k, keys), (ring_v, lambda n: [v_ref.at[*place(n), kv_head]])
        )

    @pl.when(warpgroup < COPYING)
    def multiply() -> None:
        plgpu.set_max_registers(232, action="increase")
        rows, arrived = _part(block, warpgroup), own_arrived.at[warpgroup]
        at = batch, _slice(rows), head
        q, d_out = own_q.at[warpgroup], own_d_out.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[at], q, arrived)
        plgpu.copy_gmem_to_smem(d_out_ref.at[at], d_out, arrived)
        sums, delta = (_load(x.at[batch, head, _slice(rows)], 0) for x in (sums_ref, delta_ref))
        q_ids = None if ids is None else _load(ids[0].at[at[:2]], 0)
        plgpu.barrier_wait(arrived)

        def body(n: Any, d_q: Any) -> Any:
            columns = blocks.columns_of(first + n)
            k, *k_ids = _await(ring_k, n)
            s, slope = blocks.scores(_product(q, k.transpose((1, 0))))
            ids_of_keys = _load(k_ids[0], 1) if k_ids else None
            shares = _exp(s - _along(sums, s, 0))
            shares = _visible(blocks, shares, 0.0, rows, columns, q_ids, ids_of_keys, 0)
            (v,) = _await(ring_v, n)
            d_shares = _product(d_out, v.transpose((1, 0)))
            _release(ring_v, n, interpret)
            d_s = slope * shares * (d_shares - _along(delta, s, 0))
            d_q = _add_product(d_q, d_s.astype(k.dtype), k, interpret)
            _release(ring_k, n, interpret)
            return d_q

        d_q = lax.fori_loop(0, stop - first, body, _full(q.shape, 0))
        q[...] = (blocks.scale * d_q).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, d_q_ref.at[at])
        plgpu.wait_smem_to_gmem(0)


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
    own_k: Any,
    own_v: Any,
    own_arrived: Any,
    ring_q: _Ring,
    ring_d_out: _Ring,
    *,
    blocks: ScoreBlocks,
    group: int,
    interpret: bool,
) -> None:
    """Scores are [keys, queries] here, so that no product has a transposed computed operand."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, j, kv_head = map(lax.axis_index, _GRID)
    warpgroup = lax.axis_index(_WARPGROUP)
    at_offset = read_offset(offset)
    first, stop = blocks.queries_of(blocks.columns_of(j), _of(seen, batch), j, at_offset)
    count = jnp.maximum(stop - first, 0) * group

    @pl.when(warpgroup == COPYING)
    def copy() -> None:
        def place(n: Any) -> tuple[Any, Any]:
            return _slice(blocks.rows_of(first + lax.div(n, group))), kv_head * group + lax.rem(
                n, group
            )

        def queries(n: Any) -> list[Any]:
            rows, head = place(n)
            more = [] if ids is None else [ids[0].at[batch, rows]]
            return [q_ref.at[batch, rows, head], sums_ref.at[batch, head, rows], *more]

        def d_outs(n: Any) -> list[Any]:
            rows, head = place(n)
            return [d_out_ref.at[batch, rows, head], delta_ref.at[batch, head, rows]]

        _copy_ahead(count, (ring_q, queries), (ring_d_out, d_outs))

    @pl.when(warpgroup < COPYING)
    def multiply() -> None:
        plgpu.set_max_registers(232, action="increase")
        columns, arrived = _part(blocks.columns_of(j), warpgroup), own_arrived.at[warpgroup]
        at = batch, _slice(columns), kv_head
        k, v = own_k.at[warpgroup], own_v.at[warpgroup]
        plgpu.copy_gmem_to_smem(k_ref.at[at], k, arrived)
        plgpu.copy_gmem_to_smem(v_ref.at[at], v, arrived)
        k_ids = None if ids is None else _load(ids[1].at[at[:2]], 0)
        plgpu.barrier_wait(arrived)

        def body(n: Any, carry: Any) -> Any:
            d_k, d_v = carry
            rows = blocks.rows_of(first + lax.div(n, group), at_offset)
            q, sums, *q_ids = _await(ring_q, n)
            s, slope = blocks.scores(_product(k, q.transpose((1, 0))))
            ids_of_queries = _load(q_ids[0], 1) if q_ids else None
            shares = _exp(s - _along(_load(sums, 1), s, 1))
            shares = _visible(blocks, shares, 0.0, rows, columns, ids_of_queries, k_ids, 1)
            d_out, delta = _await(ring_d_out, n)
            d_v = _add_product(d_v, shares.astype(d_out.dtype), d_out, interpret)
            d_shares = _product(v, d_out.transpose((1, 0)))
            d_s = slope * shares * (d_shares - _along(_load(delta, 1), s, 1))
            _release(ring_d_out, n, interpret)
            d_k = _add_product(d_k, d_s.astype(q.dtype), q, interpret)
            _release(ring_q, n, interpret)
            return d_k, d_v

        d_k, d_v = lax.fori_loop(0, count, body, (_full(k.shape, 0), _full(v.shape, 0)))
        k[...] = (blocks.scale * d_k).astype(k.dtype)
        v[...] = d_v.astype(v.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k, d_k_ref.at[at])
        plgpu.copy_smem_to_gmem(v, d_v_ref.at[at])
        plgpu.wait_smem_to_gmem(0)


# -- parts of the kernels --------------------------------------------------------------------------


def _exp(x: jax.Array) -> jax.Array:
    """e^x, by the GPU's exp2, of a difference of scores: see `triton`."""
    return jnp.exp2(LOG2_E * x)


def _of(seen: Any, batch: Any) -> Any:
    """The ranges of blocks of one sequence."""
    return None if seen is None else tuple(x.at[batch] for x in seen)


def _part(block: BlockPlaces, warpgroup: Any) -> BlockPlaces:
    """The rows of a multiplying warpgroup."""
    return BlockPlaces(block.start + warpgroup * TILE, TILE, block.offset)


def _slice(block: BlockPlaces) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(block.start, block.size)


def _full(shape: tuple[int, ...], value: float) -> jax.Array:
    """An array of a product's shape, or of its rows."""
    return _in_registers(jnp.full(shape, value, jnp.float32), *range(len(shape)))


def _load(ref: Any, dim: int) -> jax.Array:
    """Numbers along one dim of a product."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return _in_registers(plgpu.load(ref, optimized=False), dim)


def _along(x: jax.Array, product: jax.Array, dim: int) -> jax.Array:
    """Numbers along one dim of a product, for all of it."""
    return _in_registers(lax.broadcast_in_dim(x, product.shape, [dim]), 0, 1)


def _in_registers(x: jax.Array, *dims: int) -> jax.Array:
    """An array of a product or of one of its dims, in the registers that products have.

    Without it the compiler would search for the registers, for minutes.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA
    return plgpu.layout_cast(x, layout if len(dims) == 2 else layout.reduce(1 - dims[0]))


def _visible(
    blocks: ScoreBlocks,
    x: jax.Array,
    hidden: float,
    rows: BlockPlaces,
    columns: BlockPlaces,
    q_ids: jax.Array | None,
    k_ids: jax.Array | None,
    q_dim: int,
) -> jax.Array:
    """`x`, and `hidden` where a query does not see a key; queries are along one dim of `x`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def places(block: BlockPlaces, dim: int) -> jax.Array:
        layout = plgpu.Layout.WGMMA
        return block.first + plgpu.broadcasted_iota(jnp.int32, x.shape, dim, layout=layout)

    def visible() -> jax.Array:
        ids: tuple[Any, Any] = None, None
        if q_ids is not None and k_ids is not None:
            ids = _along(q_ids, x, q_dim), _along(k_ids, x, 1 - q_dim)
        return blocks.visible(x, hidden, places(rows, q_dim), places(columns, 1 - q_dim), *ids)

    if q_ids is not None:
        return visible()
    hides = blocks.hides(rows, columns)
    return x if hides is False else _in_registers(lax.cond(hides, visible, lambda: x), 0, 1)


def _product(a: Any, b: Any) -> jax.Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def multiply(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _add_product(sums: jax.Array, a: jax.Array, b: Any, interpret: bool) -> jax.Array:
    """`sums + a @ b`, `a` in registers.

    The interpreter has neither such operands nor initial values (jax 0.11.2, 0.12.0).
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(sums))


# -- blocks on their way ---------------------------------------------------------------------------


def _copy_ahead(count: Any, *rings: tuple[_Ring, Callable[[Any], Sequence[Any]]]) -> None:
    """Copy `count` blocks of each source through its ring."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.set_max_registers(40, action="decrease")

    def released(n: Any, ring: _Ring) -> None:
        plgpu.barrier_wait(ring.released.at[lax.rem(n, STAGES)])

    def copy(n: Any, again: bool) -> None:
        stage = lax.rem(n, STAGES)
        for ring, source in rings:
            if again:
                released(n, ring)
            for ref, buffer in zip(source(n), ring.buffers, strict=True):
                plgpu.copy_gmem_to_smem(ref, buffer.at[stage], ring.arrived.at[stage])

    for n in range(STAGES):
        pl.when(n < count)(functools.partial(copy, jnp.int32(n), False))
    pl.loop(STAGES, count)(functools.partial(copy, again=True))

    # The interpreter of jax 0.11.2 refuses barriers that nothing waits for at the end.
    def finish(n: Any) -> None:
        for ring, _ in rings:
            released(n, ring)

    for n in range(STAGES):
        last = count - STAGES + n
        pl.when(last >= 0)(functools.partial(finish, last))


def _await(ring: _Ring, n: Any) -> list[Any]:
    """The buffers of block `n`, once it is there."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stage = lax.rem(n, STAGES)
    plgpu.barrier_wait(ring.arrived.at[stage])
    return [buffer.at[stage] for buffer in ring.buffers]


def _release(ring: _Ring, n: Any, interpret: bool) -> None:
    """Let block `n` be overwritten.

    Between reads of a warpgroup, other than those of products, and a copy to the same place stands
    a fence. The interpreter's products read as a warpgroup does (`_add_product`).
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret or len(ring.buffers) > 1:
        plgpu.commit_smem()
    plgpu.barrier_arrive(ring.released.at[lax.rem(n, STAGES)])


# -- calls -----------------------------------------------------------------------------------------


def _shared(shape: Sequence[int], dtype: Any) -> Any:
    """An array in shared memory, in tiles of 8 rows of 128 bytes if it is of a product."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if len(shape) < 3:
        return plgpu.SMEM(tuple(shape), dtype)
    width = 128 // jnp.dtype(dtype).itemsize
    of: Any = plgpu  # to mypy these two classes are abstract (jax 0.12.0)
    tiles = of.TilingTransform((8, width)), of.SwizzleTransform(128)
    return plgpu.SMEM(tuple(shape), dtype, transforms=tiles)


def _own(x: jax.Array) -> Any:
    return _shared((COPYING, TILE, x.shape[-1]), x.dtype)


def _ring(block: int, x: jax.Array, segments: Segments | None, *numbers: jax.Array) -> _Ring:
    """Of blocks of `x`, of numbers of its rows, and of their segment ids if there are any."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    dtypes = [*(n.dtype for n in numbers), *([] if segments is None else [jnp.int32])]
    buffers = [
        _shared((STAGES, block, x.shape[-1]), x.dtype),
        *(_shared((STAGES, block), dtype) for dtype in dtypes),
    ]
    arrived = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=STAGES)
    released = plgpu.Barrier(num_arrivals=COPYING, num_barriers=STAGES)
    return _Ring(tuple(buffers), arrived, released)


def _arrived(copies: int) -> Any:
    """Barriers of each multiplying warpgroup for its own operands."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.Barrier(num_arrivals=copies, num_barriers=COPYING)


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    results: Sequence[tuple[Any, Any]],
    shared: Callable[[], Sequence[Any]],
    soft_cap: float | None,
    interpret: bool,
) -> Callable[..., Any]:
    """A kernel of (segment ids, ranges of blocks, offset, *arrays)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(
        functools.partial(kernel, interpret=interpret),
        out_type=[jax.ShapeDtypeStruct(*result) for result in results],
        scratch_types=shared(),
        grid=grid,
        grid_names=_GRID,
        num_threads=COPYING + 1,
        thread_name=_WARPGROUP,
        # The approximate tanh has 11 bits.
        compiler_params=plgpu.CompilerParams(approx_math=soft_cap is None),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
