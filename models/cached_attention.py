"""Base class of the families' attention, which keeps keys and values while text is generated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed import ops

from .layers import LayerCache, Linear


class CachedAttention(nnx.Module):
    """Attention with a key-value cache once `init_cache` was called; without one it is stateless.

    The key of position p is in slot p: sequences of one batch may differ in length, and what lies
    behind a sequence's end is never seen.
    """

    k_proj: Linear
    # [..., rows, kv_heads, length, head_dim]: products of a head's keys need no transpose.
    key_cache: nnx.Cache[jax.Array] | None = None
    value_cache: nnx.Cache[jax.Array] | None = None

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        """An empty cache of `length` slots for each sequence, stacked as the parameters are."""
        *stack, _, kv_heads, head_dim = self.k_proj.kernel.shape
        shape = *stack, rows, kv_heads, length, head_dim
        self.key_cache, self.value_cache = (nnx.Cache(jnp.zeros(shape, dtype)) for _ in range(2))

    def attend_cached(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array | None,
        window: int | jax.Array | None = None,
        **options: Any,
    ) -> jax.Array | None:
        """Attention of one token of each sequence, at `positions` [rows, 1].

        None for more tokens, which are the start of a sequence: their keys and values are stored.
        """
        if self.key_cache is None or self.value_cache is None:
            return None
        if q.shape[1] > 1:
            self.stored(k, v)
            return None
        assert positions is not None
        keys = _write_slots(self.key_cache, k, positions)
        values = _write_slots(self.value_cache, v, positions)
        slots = jnp.arange(keys.shape[1])
        seen = slots <= positions
        if window is not None:
            seen &= slots > positions - window
        return ops.attention(
            q,
            keys,
            values,
            causal=False,
            segment_ids=jnp.ones_like(positions),
            kv_segment_ids=seen.astype(positions.dtype),
            implementation="plain",  # the scores of one token are few
            **options,
        )

    def stored(self, *new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of another sequence: the new ones, or those of the cache."""
        if self.key_cache is None or self.value_cache is None or new:
            for cache, x in zip((self.key_cache, self.value_cache), new):
                if cache is not None:
                    _write(cache, x)
            k, v = new
            return k, v
        return _by_slot(self.key_cache), _by_slot(self.value_cache)


def _by_slot(cache: nnx.Cache) -> jax.Array:
    """What is stored, [rows, length, kv_heads, head_dim]."""
    value = cache.get_value()
    return jnp.swapaxes(value.read() if isinstance(value, LayerCache) else value, 1, 2)


def _write(cache: nnx.Cache, new: jax.Array) -> None:
    """Write the first slots of all rows."""
    old = cache.get_value()
    before = old.read() if isinstance(old, LayerCache) else old
    value = before.at[:, :, : new.shape[1]].set(jnp.swapaxes(new, 1, 2))
    cache.set_value(old.write(value) if isinstance(old, LayerCache) else value)


def _write_slots(cache: nnx.Cache, new: jax.Array, positions: jax.Array) -> jax.Array:
    """What is stored, after one slot of each row was written in place."""
    old = cache.get_value()
    layer = old if isinstance(old, LayerCache) else LayerCache(old[None], jnp.zeros((), jnp.int32))
    written = layer.write_slots(new[:, 0], positions[:, 0])
    cache.set_value(written if isinstance(old, LayerCache) else written.stack[0])
    return _by_slot(cache)
