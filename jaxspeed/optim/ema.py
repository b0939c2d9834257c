"""Exponential moving average of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def init(params: Any) -> Any:
    """The average before the first update: a copy, so that each can be donated separately.

    In float32 at least: a bf16 average would round small updates to zero.
    """
    return jax.tree.map(
        lambda p: jnp.array(p, dtype=jnp.promote_types(p.dtype, jnp.float32), copy=True), params
    )


def update(ema: Any, params: Any, decay: float) -> Any:
    """`decay ema + (1 - decay) params`, each leaf in the dtype of the average."""
    params = jax.tree.map(lambda p, average: p.astype(average.dtype), params, ema)
    return optax.incremental_update(params, ema, 1.0 - decay)
