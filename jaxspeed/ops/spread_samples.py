"""Samples that are spread over more axes than those of the batch, and back."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import PIPE, TENSOR, position_axes, product, sample_axes
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.constrain import constrain


def spread_samples(x: jax.Array) -> jax.Array:
    """Shard dim 0 over all axes of the context's mesh, outermost the samples', that divide it."""
    return _over(x, (*sample_axes(), PIPE, *position_axes(), TENSOR), "samples.spread")


def gathered_samples(x: jax.Array) -> jax.Array:
    """Shard dim 0 as that of a batch."""
    return _over(x, sample_axes(), "samples.gathered")


def _over(x: jax.Array, wanted: tuple[str, ...], site: str) -> jax.Array:
    free = free_axes()
    axes: tuple[str, ...] = ()
    for axis in wanted:
        if free.get(axis, 1) > 1 and x.shape[0] % product((*axes, axis), free) == 0:
            axes += (axis,)
    if all(size == 1 for size in free.values()):
        return x
    entries: list[Any] = [axes or None, *[None] * (x.ndim - 1)]
    return constrain(x, NamedSharding(jax.sharding.get_abstract_mesh(), P(*entries)), site)
