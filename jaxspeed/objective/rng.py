"""Randomness: one rule, so that the numbers are the same on every mesh.

A stream's key at micro-batch i of step t is `fold_in(fold_in(key, t), i)`, where `key` is what the
model's stream was made with from the run's seed. Nothing of the mesh enters, so plain single-device
training that calls the same function draws the same numbers.
"""

import jax
import jax.numpy as jnp

LINEN_STREAMS = ("params", "dropout")


def micro_batch_key(key: jax.Array, step: jax.Array | int, micro: jax.Array | int) -> jax.Array:
    """The key of one stream for one micro-batch; a stack of keys gives a stack."""

    def fold(key: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, step), micro)

    for _ in range(key.ndim if is_key(key) else key.ndim - 1):
        fold = jax.vmap(fold)
    return fold(key)


def is_key(x: jax.Array) -> bool:
    """A typed key array (not the raw uint32 form)."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def linen_rngs(key: jax.Array) -> dict[str, jax.Array]:
    """The streams that a Linen module is given; a name that is not here falls back to `params`."""
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(LINEN_STREAMS)}
