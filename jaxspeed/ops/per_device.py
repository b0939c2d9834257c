"""Running a kernel on each device's own batch and heads: XLA does not partition a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxspeed.ops.mask import Segments

BATCH_AXES = ("replica", "data")
HEAD_AXIS = "tensor"


def over_batch_and_heads(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    **options: object,
) -> jax.Array:
    """`kernel(q, k, v, segments, **options)` on each device of the mesh in the trace's context.

    The batch is cut over `BATCH_AXES` and the heads over `HEAD_AXIS`, as far as they divide;
    everything else is whole on each device. Axes that are manual already, inside a `shard_map`, are
    left alone: there the arrays are this device's part of them.
    """
    kernel = functools.partial(kernel, **options)
    mesh = jax.sharding.get_abstract_mesh()
    free = {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
        if kind is not AxisType.Manual
    }
    if not free:
        return kernel(q, k, v, segments)

    batch_axes: tuple[str, ...] = ()
    for name in BATCH_AXES:
        parts = math.prod(free[axis] for axis in batch_axes) * free.get(name, 1)
        if free.get(name, 1) > 1 and q.shape[0] % parts == 0:
            batch_axes += (name,)

    heads, kv_heads = q.shape[2], k.shape[2]
    head_parts = free.get(HEAD_AXIS, 1)
    copies = head_parts // math.gcd(head_parts, kv_heads)  # of each key head, so that they divide
    head_axis = None
    if head_parts > 1 and heads % (kv_heads * copies) == 0:
        head_axis = HEAD_AXIS
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v)) if copies > 1 else (k, v)

    part = P(batch_axes or None, None, head_axis)
    return jax.shard_map(
        kernel,
        in_specs=(part, part, part, P(batch_axes or None)),
        out_specs=part,
        axis_names=set(free),
        check_vma=False,  # a Pallas call does not say over which axes its results vary
    )(q, k, v, segments)
