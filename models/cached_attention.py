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
    cached_key: nnx.Cache[jax.Array] | None = None  # [..., rows, length, kv_heads, head_dim]
    cached_value: nnx.Cache[jax.Array] | None = None

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        """An empty cache of `length` slots for each sequence, stacked as the parameters are."""
        *stack, _, kv_heads, head_dim = self.k_proj.kernel.shape
        empty = jnp.zeros((*stack, rows, length, kv_heads, head_dim), dtype)
        self.cached_key, self.cached_value = nnx.Cache(empty), nnx.Cache(empty)

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
        if self.cached_key is None or self.cached_value is None:
            return None
        keys, values = _read(self.cached_key), _read(self.cached_value)
        if q.shape[1] > 1:
            _write(self.cached_key, keys.at[:, : k.shape[1]].set(k))
            _write(self.cached_value, values.at[:, : v.shape[1]].set(v))
            return None
        assert positions is not None
        slots = jnp.arange(keys.shape[1])
        here = (slots == positions)[..., None, None]  # not a scatter: each device has its rows
        keys = _write(self.cached_key, jnp.where(here, k, keys))
        values = _write(self.cached_value, jnp.where(here, v, values))
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
        if self.cached_key is None or self.cached_value is None or new:
            for cache, x in zip((self.cached_key, self.cached_value), new):
                if cache is not None:
                    _write(cache, _read(cache).at[:, : x.shape[1]].set(x))
            k, v = new
            return k, v
        return _read(self.cached_key), _read(self.cached_value)


def _read(cache: nnx.Cache) -> jax.Array:
    value = cache.get_value()
    return value.read() if isinstance(value, LayerCache) else value


def _write(cache: nnx.Cache, value: jax.Array) -> jax.Array:
    """The cache's value after it."""
    old = cache.get_value()
    cache.set_value(old.write(value) if isinstance(old, LayerCache) else value)
    return _read(cache)
