"""Gradient accumulation over micro-batches: a running weighted mean.

The mean of (mean m, weight W) and a new (g, w) is m + (g - m) w / (W + w), so that neither many
micro-batches nor large weights leave the range of a 16-bit accumulator. A sum whose weight is 0 is
kept as it is, per weight of 1: a part of the samples may weigh nothing and have a gradient, as of a
penalty. If all weights are 0, the mean is 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspeed.objectives.terms_and_metrics import Metric
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.train_state.state import Arrays


class Sums(NamedTuple):
    """Accumulated loss, gradients and metrics of micro-batches."""

    grads: Arrays  # weighted mean so far, times the loss scale
    total: jax.Array
    weight: jax.Array
    metrics: dict[str, Metric]  # so far
    errors: Any = ()  # by bucket, the quantization errors of ring messages


class Share(NamedTuple):
    """How a new gradient changes the mean m: m + (g - kept m) share."""

    share: jax.Array
    kept: jax.Array  # 1, where no weight is 0


def unit_of(weight: jax.Array) -> jax.Array:
    """The weight by which a gradient is divided: its own, or 1 where that is 0."""
    return jnp.where(weight > 0, weight, 1)


def accumulate[Part: (Loss, Sums)](seen: Part, new: Part) -> tuple[Part, Share]:
    """Add totals, weights and metrics of `new`; also return its share in the weight.

    Gradients are added by `running_mean` with that share, each where it is stored.
    """
    weight = seen.weight + new.weight
    share = per_weight(new.weight, weight)

    def mean(old: jax.Array, new: jax.Array) -> jax.Array:
        """The mean of both; of a part without weight it may be 0 / 0."""
        both = running_mean(old, new, Share(share, jnp.ones_like(share)))
        return jnp.where(share == 0, old, jnp.where(share == 1, new, both))

    metrics = {name: seen.metrics[name].combined(x, mean) for name, x in new.metrics.items()}
    added = seen._replace(total=seen.total + new.total, weight=weight, metrics=metrics)
    if isinstance(added, Loss) and isinstance(new, Loss):
        added = added._replace(terms=jax.tree.map(jnp.add, added.terms, new.terms))
    old_unit, new_unit, unit = map(unit_of, (seen.weight, new.weight, weight))
    is_mean = (seen.weight > 0) & (new.weight > 0)
    return added, Share(new_unit / unit, jnp.where(is_mean, 1, (unit - old_unit) / new_unit))


def running_mean(mean: jax.Array, new: jax.Array, how: Share) -> jax.Array:
    """Compute `mean + (new - kept mean) share` in the wider dtype."""
    wide = jnp.promote_types(mean.dtype, how.share.dtype)
    share, kept = (x.astype(wide) for x in how)
    wide_mean = mean.astype(wide)
    return (wide_mean + (new.astype(wide) - kept * wide_mean) * share).astype(mean.dtype)


def shares(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute (share of each part in the total weight, total weight).

    The mean over parts is their sum, each times its share.
    """
    weight = weights.sum()  # once: a second sum over ranks is a second all-reduce
    return per_weight(unit_of(weights), weight), weight


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
