"""Running a kernel on each device's own batch and heads: XLA does not partition a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from jaxspeed.ops.axes import TENSOR, free_axes
from jaxspeed.ops.key_heads import copies_of, repeated
from jaxspeed.ops.mask import Segments

BATCH_AXES = ("replica", "data")


def over_batch_and_heads(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    **options: object,
) -> jax.Array:
    """`kernel(q, k, v, segments, **options)` on each device of the mesh in the trace's context.

    The batch is cut over `BATCH_AXES` and the heads over `tensor`, as far as they divide;
    everything else is whole on each device. Axes that are manual already, inside a `shard_map`, are
    left alone: there the arrays are this device's part of them.
    """
    kernel = functools.partial(kernel, **options)
    free = free_axes()
    if not free:
        return kernel(q, k, v, segments)

    batch_axes: tuple[str, ...] = ()
    for name in BATCH_AXES:
        parts = math.prod(free[axis] for axis in batch_axes) * free.get(name, 1)
        if free.get(name, 1) > 1 and q.shape[0] % parts == 0:
            batch_axes += (name,)

    parts = free.get(TENSOR, 1)
    copies = copies_of(q.shape[2], k.shape[2], parts)
    head_axis = TENSOR if parts > 1 and copies else None
    if head_axis:
        k, v = (repeated(x, copies) for x in (k, v))

    part = P(batch_axes or None, None, head_axis)
    return jax.shard_map(
        kernel,
        in_specs=(part, part, part, P(batch_axes or None)),
        out_specs=part,
        axis_names=set(free),
        check_vma=False,  # a Pallas call does not say over which axes its results vary
    )(q, k, v, segments)
