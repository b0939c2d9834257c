"""Key and value heads for devices that share the query heads: each has those that its queries read.

Where there are fewer key heads than devices, or a number that they do not divide, all devices
compute all of them, and some key heads are read on several devices.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from jaxspeed.ops.free_axes import tensor_parts


def copies_of(heads: int, kv_heads: int, parts: int) -> int:
    """How often each key head is there where `parts` devices share all heads; 0: they cannot."""
    copies = parts // math.gcd(parts, kv_heads)
    return copies if heads % (kv_heads * copies) == 0 else 0


def shared_by_devices(q: jax.Array, *keys: jax.Array) -> tuple[jax.Array, ...]:
    """Keys and values with as many heads as the devices that share those of q can cut."""
    copies = copies_of(q.shape[2], keys[0].shape[2], tensor_parts()) or 1
    return tuple(repeated(x, copies) for x in keys)


def repeated(x: jax.Array, copies: int) -> jax.Array:
    """Keys or values [batch, seq, kv_heads, head_dim] with each head `copies` times in a row.

    As a lookup, whose result the compiler cuts over devices: each picks its own heads of x, and the
    gradient of x is one all-reduce. Of a plain `jnp.repeat`, which is a broadcast and a reshape, it
    would cut the heads of x as finely as they go, and gather them for the copies.
    """
    if copies == 1:
        return x
    heads = np.arange(x.shape[2] * copies) // copies
    return x.at[:, :, heads].get(mode="promise_in_bounds", indices_are_sorted=True)
