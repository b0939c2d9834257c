"""Samples that are sharded over more axes than those of a batch: the images of an encoder."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import PIPE, TENSOR, position_axes, product, sample_axes
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.constrain import constrain


def spread_samples(x: jax.Array) -> jax.Array:
    """Shard dim 0 over all axes of the context's mesh, outermost the samples', that divide it."""
    free = free_axes()
    axes: tuple[str, ...] = ()
    for axis in (*sample_axes(), PIPE, *position_axes(), TENSOR):
        if free.get(axis, 1) > 1 and x.shape[0] % product((*axes, axis), free) == 0:
            axes += (axis,)
    if not axes:
        return x
    entries = [axes, *[P.UNCONSTRAINED] * (x.ndim - 1)]
    at = NamedSharding(jax.sharding.get_abstract_mesh(), P(*entries))
    return constrain(x, at, "samples.spread")
