"""Gradient accumulation over micro-batches: a running weighted mean.

The mean of (mean m, weight W) and a new (g, w) is m + (g - m) w / (W + w), so that neither many
micro-batches nor large weights leave the range of a 16-bit accumulator. If all weights are 0, it
is 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.objective.loss import Loss
from jaxspeed.objective.metric import Metric
from jaxspeed.train_state.state import Arrays


class Sums(NamedTuple):
    """Accumulated loss, gradients and metrics of micro-batches."""

    grads: Arrays  # weighted mean so far, times the loss scale
    total: jax.Array
    weight: jax.Array
    metrics: dict[str, Metric]  # so far
    errors: Any = ()  # by bucket, the quantization errors of ring messages


def accumulate[Part: (Loss, Sums)](seen: Part, new: Part) -> tuple[Part, jax.Array]:
    """Add totals, weights and metrics of `new`; also return its share in the weight.

    Gradients are added by `running_mean` with that share, each where it is stored.
    """
    weight = seen.weight + new.weight
    share = per_weight(new.weight, weight)

    def mean(old: jax.Array, new: jax.Array) -> jax.Array:
        """The mean of both; of a part without weight it may be 0 / 0."""
        both = running_mean(old, new, share)
        return jnp.where(share == 0, old, jnp.where(share == 1, new, both))

    metrics = {name: seen.metrics[name].combined(x, mean) for name, x in new.metrics.items()}
    added = seen._replace(total=seen.total + new.total, weight=weight, metrics=metrics)
    if isinstance(added, Loss) and isinstance(new, Loss):
        added = added._replace(terms=jax.tree.map(jnp.add, added.terms, new.terms))
    return added, share


def running_mean(mean: jax.Array, new: jax.Array, share: jax.Array) -> jax.Array:
    """Compute `mean + (new - mean) share` in the wider dtype."""
    wide = jnp.promote_types(mean.dtype, share.dtype)
    wide_mean = mean.astype(wide)
    return (wide_mean + (new.astype(wide) - wide_mean) * share.astype(wide)).astype(mean.dtype)


def shares(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute (share of each part in the total weight, total weight).

    The mean over parts is their sum, each times its share.
    """
    weight = weights.sum()  # once: a second sum over ranks is a second all-reduce
    return per_weight(weights, weight), weight


def per_weight(x: Any, weight: jax.Array) -> jax.Array:
    """Compute `x / weight`, and 0 where the weight is 0."""
    return jnp.where(weight > 0, x / jnp.where(weight > 0, weight, 1), 0)


def micro_batches(batch: Any, count: int, ranks: int) -> Any:
    """Split a batch [samples, ...] into [count, samples / count, ...].

    Micro-batch i is the i-th slice of the shard of each of the `ranks`, without communication.
    """

    def split(x: jax.Array) -> jax.Array:
        if not x.shape:
            return jnp.broadcast_to(x, (count,))
        parts = x.reshape(ranks, count, -1, *x.shape[1:])
        return jnp.moveaxis(parts, 0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def micro_batch_shapes(batch: Any, count: int) -> Any:
    """Shapes of one of `count` micro-batches."""

    def first(x: Any) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // count, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(first, batch)
