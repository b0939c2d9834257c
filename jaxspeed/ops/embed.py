"""Embedding lookup."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [...] of `table` [vocab, embed]: [..., embed].

    An id outside [0, vocab), negative ones included, gives a row of NaN: a program on a device
    cannot raise, and a wrong row would silently corrupt training.
    """
    ids = jnp.where(ids < 0, table.shape[0], ids)  # else JAX indexes from the end
    return table.at[ids].get(mode="fill", fill_value=jnp.nan)
