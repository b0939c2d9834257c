"""Attention that no kernel computes, over a sharded sequence: its own program, by blocks of rows.

Keys are gathered, as the compiler does it, and a loop has a block of each device's queries in every
trip, with the rows of the other operands that belong to them. The backward pass recomputes a block,
so that the scores of all queries are never saved. What the program computes is computed, exactly:
masks and biases of all kinds, casts, and what a query gets that sees no key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import SEQ, TENSOR
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.dim_blocks import MixedDim, on_indices
from jaxspeed.ops.free_axes import free_axes, free_sample_shards
from jaxspeed.ops.two_passes import NAME

MOST_SCORES = 1 << 24  # of a block on a device
FEWEST_ROWS = 8


def by_rows(
    body: Callable[..., jax.Array], rows: tuple[int | None, ...], *operands: jax.Array
) -> jax.Array:
    """`body(*operands)`; `rows` has the dim of each operand that belongs to the queries."""
    closed = jax.make_jaxpr(body)(*operands)
    try:
        run = on_indices(closed, rows)
    except MixedDim as error:
        raise ModelError(
            f"attention over a sharded sequence: {error} mixes queries between the products"
        ) from None
    q, k = operands[:2]
    (batch, seq, heads, _), kv_seq = q.shape, k.shape[1]
    free = free_axes()
    parts = free[SEQ]
    of_row = -(-batch // free_sample_shards()) * -(-heads // free.get(TENSOR, 1)) * kv_seq
    shard = -(-seq // parts)
    block = min(max(MOST_SCORES // of_row, FEWEST_ROWS), shard)
    trips = -(-shard // block)
    block = -(-shard // trips)

    def constrained(x: jax.Array, dim: int, axis: str | None) -> jax.Array:
        spec: list[Any] = [P.UNCONSTRAINED] * x.ndim
        spec[dim] = axis
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), P(*spec))
        return lax.with_sharding_constraint(x, sharding)

    def in_blocks(x: jax.Array, dim: int) -> jax.Array:
        """[trips, parts, ..., block, ...]; rows are added that repeat the last one."""
        more = [(0, parts * trips * block - seq if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, more, mode="edge")
        x = x.reshape(*x.shape[:dim], parts, trips, block, *x.shape[dim + 1 :])
        return jnp.moveaxis(x, (dim + 1, dim), (0, 1))

    # A copy for each device: the gradients of all trips are summed over the devices only once.
    shared = [
        constrained(jnp.broadcast_to(x, (parts, *x.shape)), 0, SEQ) if dim is None else None
        for x, dim in zip(operands, rows, strict=True)
    ]

    @jax.checkpoint
    def of_block(trip: jax.Array, blocks: list[jax.Array]) -> jax.Array:
        shards = jnp.arange(parts)[:, None] * trips * block
        indices = jnp.minimum(shards + trip * block + jnp.arange(block), seq - 1)
        arrays = iter(blocks)
        inputs = (constrained(next(arrays), 0, SEQ) if x is None else x for x in shared)
        (out,) = jax.vmap(run)(indices, *inputs)
        return constrained(out, 0, SEQ)

    blocks = [in_blocks(x, dim) for x, dim in zip(operands, rows, strict=True) if dim is not None]
    outs = lax.map(lambda trip_and_blocks: of_block(*trip_and_blocks), (jnp.arange(trips), blocks))
    out = jnp.moveaxis(outs, (2, 1, 0), (0, 1, 2))
    out = out.reshape(batch, parts * trips * block, *out.shape[4:])
    return checkpoint_name(constrained(out[:, :seq], 1, SEQ), NAME)
