"""Accumulation over micro-batches: the weighted mean of what has been seen so far.

Of (mean m, weight W) and a new (g, w) it is m + (g - m) w / (W + w), so that neither many
micro-batches nor large weights leave the range of a 16-bit accumulator. A weight of 0 throughout
gives 0.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxspeed.objective.loss import Loss
from jaxspeed.objective.train_state import Arrays


class Sums(NamedTuple):
    """What micro-batches add up to."""

    grads: Arrays  # weighted mean so far, times the loss scale
    total: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]  # weighted mean so far
    errors: Any = ()  # by bucket, what packing them for a ring has lost


Part = TypeVar("Part", Loss, Sums)


def accumulate(seen: Part, new: Part) -> tuple[Part, jax.Array]:
    """`seen` with the totals, weights and metrics of `new`, and the share of `new` in the weight.

    Gradients are added by `running_mean` with that share, each where it is kept.
    """
    weight = seen.weight + new.weight
    share = per_weight(new.weight, weight)
    metrics = {n: running_mean(seen.metrics[n], m, share) for n, m in new.metrics.items()}
    added = seen._replace(total=seen.total + new.total, weight=weight, metrics=metrics)
    return added, share


def running_mean(mean: jax.Array, new: jax.Array, share: jax.Array) -> jax.Array:
    """`mean + (new - mean) share`, computed in the wider dtype."""
    wide = jnp.promote_types(mean.dtype, share.dtype)
    wide_mean = mean.astype(wide)
    return (wide_mean + (new.astype(wide) - wide_mean) * share.astype(wide)).astype(mean.dtype)


def shares(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the share of each part in the weight of all, that weight).

    The mean over parts is the sum of each one's times its share.
    """
    weight = weights.sum()  # once: a second sum over ranks is a second all-reduce
    return per_weight(weights, weight), weight


def per_weight(x: Any, weight: jax.Array) -> jax.Array:
    """`x / weight`, and 0 where nothing was weighed."""
    return jnp.where(weight > 0, x / weight, 0)


def micro_batches(batch: Any, count: int, ranks: int) -> Any:
    """A batch [samples, ...] as [count, samples / count, ...].

    Micro-batch i is the i-th slice of each of the `ranks`' own part, so nothing crosses devices.
    """

    def split(x: jax.Array) -> jax.Array:
        if not x.shape:
            return jnp.broadcast_to(x, (count,))
        parts = x.reshape(ranks, count, -1, *x.shape[1:])
        return jnp.moveaxis(parts, 0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def micro_batch_shapes(batch: Any, count: int) -> Any:
    """One of `count` micro-batches, as shapes."""

    def first(x: Any) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // count, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(first, batch)
