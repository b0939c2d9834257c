"""LayerNorm and RMSNorm over the last dims, computed in fp32, returned in the input's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops.saved_inputs import saves_inputs


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, eps: float = 1e-5
) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * scale + bias (Ba et al., arXiv:1607.06450)."""

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        out = centred * lax.rsqrt(variance + eps) * scale
        return (out if bias is None else out + bias).astype(x.dtype)

    return saves_inputs(norm)(x, scale, bias)


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float = 1e-5) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich, arXiv:1910.07467).

    The mean is over as many dims as `scale` has: over (heads, head_dim) of all heads at once.
    """

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        dims = tuple(range(-scale.ndim, 0))
        mean_square = jnp.mean(jnp.square(wide), axis=dims, keepdims=True)
        return (wide * lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)

    return saves_inputs(norm)(x, scale)
