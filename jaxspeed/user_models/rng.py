"""Random streams: keys per step and micro-batch, the same on every mesh.

A stream's key at micro-batch i of step t is `fold_in(fold_in(key, t), i)`, where `key` is the
stream's key from the run's seed. It does not depend on the mesh, so plain single-device
training that calls the same function draws the same numbers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

FALLBACK = "params"  # the stream of Linen from which a module draws where its own is absent
LOSS = 0x6C6F7373  # far from the counts by which modules derive their keys
LINEN_STREAMS = (FALLBACK, "dropout")


def micro_batch_key(key: jax.Array, step: jax.Array | int, micro: jax.Array | int) -> jax.Array:
    """Key of one stream for one micro-batch; a stack of keys gives a stack."""

    def fold(key: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, step), micro)

    for _ in range(key.ndim if is_key(key) else key.ndim - 1):
        fold = jax.vmap(fold)
    return fold(key)


def is_key(x: jax.Array) -> bool:
    """Whether `x` is a typed key array (not the raw uint32 form)."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def linen_rngs(key: jax.Array, asked: Sequence[str] = ()) -> dict[str, jax.Array]:
    """Streams of a Linen module, and those it asks for; any other name falls back to `params`."""
    names = (*LINEN_STREAMS, *(name for name in asked if name not in LINEN_STREAMS))
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}


def loss_key(key: jax.Array, step: jax.Array | int, micro: jax.Array | int) -> jax.Array:
    """Key of the loss function itself for one micro-batch; `key` is that of the seed."""
    return jax.random.fold_in(micro_batch_key(key, step, micro), LOSS)


def batch_key(key: jax.Array, micro: jax.Array | int) -> jax.Array:
    """Key of one micro-batch from that of a batch: the first has the key itself."""
    of_later = jax.random.fold_in(key, micro)
    return jax.lax.select(jnp.asarray(micro) == 0, key, of_later)
