"""Key and value heads for devices that share the query heads: each has those that its queries read.

Where there are fewer key heads than devices, or a number that they do not divide, all devices
compute all of them, and some key heads are read on several devices.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxspeed.ops.axes import over_tensor


def copies_of(heads: int, kv_heads: int, parts: int) -> int:
    """How often each key head is there where `parts` devices share all heads; 0: they cannot."""
    copies = parts // math.gcd(parts, kv_heads)
    return copies if heads % (kv_heads * copies) == 0 else 0


def repeated(x: jax.Array, copies: int, parts: int) -> jax.Array:
    """Keys or values [batch, seq, kv_heads, head_dim] with each head `copies` times in a row.

    The result is cut over the tensor axis of `parts` devices. Each picks its own heads, written as
    a batch over the devices: of a plain `jnp.repeat` the compiler would cut the heads as finely as
    they go, and gather them for the copies. The gradient of x is then one all-reduce.
    """
    if copies == 1:
        return x
    batch, seq, kv_heads, head_dim = x.shape
    own = kv_heads * copies // parts  # heads of one device
    read = (jnp.arange(kv_heads * copies) // copies).reshape(parts, own)
    on_each = over_tensor(jnp.broadcast_to(x, (parts, *x.shape)), 0, "attention.key_heads")
    picked = jax.vmap(lambda x, heads: x[:, :, heads])(on_each, read)
    return jnp.moveaxis(picked, 0, 2).reshape(batch, seq, kv_heads * copies, head_dim)
