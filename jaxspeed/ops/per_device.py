"""shard_map of a kernel over batch and heads, since XLA does not partition kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import TENSOR, product
from jaxspeed.ops.free_axes import free_axes, free_sample_axes
from jaxspeed.ops.mask import Segments


def over_batch_and_heads(
    kernel: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *more: jax.Array,
    out_ranks: Any = 4,
    **options: object,
) -> Any:
    """Run `kernel(q, k, v, segments, *more, **options)` on each device of the context's mesh.

    The samples are sharded over their axes and the heads over `tensor`, as far as they divide;
    everything else is replicated. Axes that are already manual, inside a `shard_map`, are left
    alone: there the arrays are shards already. Arrays of `more` and results, whose ranks are
    `out_ranks`, are of rank 4 [batch, seq, heads, head_dim] or of rank 3 [batch, heads, seq].
    """
    kernel = functools.partial(kernel, **options)
    free = free_axes()
    if not free:
        return kernel(q, k, v, segments, *more)

    batch_axes: tuple[str, ...] = ()
    for name in free_sample_axes():
        if q.shape[0] % product((*batch_axes, name), free) == 0:
            batch_axes += (name,)

    divides = q.shape[2] % free.get(TENSOR, 1) == 0 == k.shape[2] % free.get(TENSOR, 1)
    head_axis = TENSOR if free.get(TENSOR, 1) > 1 and divides else None
    batch = batch_axes or None
    specs = {4: P(batch, None, head_axis), 3: P(batch, head_axis)}
    part = specs[4]
    return jax.shard_map(
        kernel,
        in_specs=(part, part, part, P(batch), *(specs[x.ndim] for x in more)),
        out_specs=jax.tree.map(specs.get, out_ranks),
        axis_names=set(free),
        check_vma=False,  # a Pallas call does not declare over which axes its results vary
    )(q, k, v, segments, *more)
