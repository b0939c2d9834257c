"""Key and value heads for sharded query heads: repeated, so that each device has those it reads.

With fewer key heads than devices, or a number that they do not divide, all devices compute all key
heads, and some are read on several devices.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from jaxspeed.ops.free_axes import tensor_parts


def copies_of(heads: int, kv_heads: int, parts: int) -> int:
    """Copies of each key head for heads sharded over `parts` devices; 0: impossible."""
    copies = parts // math.gcd(parts, kv_heads)
    return copies if heads % (kv_heads * copies) == 0 else 0


def repeated_for_sharding(q: jax.Array, *keys: jax.Array) -> tuple[jax.Array, ...]:
    """Keys and values with heads repeated so that they can be sharded as those of q."""
    copies = copies_of(q.shape[2], keys[0].shape[2], tensor_parts()) or 1
    return tuple(repeated(x, copies) for x in keys)


def repeated(x: jax.Array, copies: int) -> jax.Array:
    """Keys or values [batch, seq, kv_heads, head_dim] with each head `copies` times in a row.

    A gather, whose result the compiler shards: each device selects its heads of x, and the gradient
    of x is one all-reduce. With `jnp.repeat`, a broadcast and a reshape, it would shard the heads
    of x as far as possible, and all-gather them for the copies.
    """
    if copies == 1:
        return x
    heads = np.arange(x.shape[2] * copies) // copies
    return x.at[:, :, heads].get(mode="promise_in_bounds", indices_are_sorted=True)
