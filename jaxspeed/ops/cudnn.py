"""cuDNN's fused attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspeed.ops.mask import Mask, Segments


def takes(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, mask: Mask) -> bool:
    """Whether this installation's cuDNN works on these shapes, dtypes and masks.

    Segments would have to become a bias of [batch, 1, seq, seq] whose gradient cuDNN computes as
    well; they go to the plain kernel. The rest is asked of JAX, which knows its cuDNN.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or segments is not None:
        return False
    if mask.window is not None and not mask.causal:
        return False  # cuDNN's window looks back only
    try:
        attend_here = functools.partial(attend, segments=None, mask=mask, scale=1.0)
        jax.eval_shape(lambda *qkv: jax.vjp(attend_here, *qkv)[0], q, k, v)
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # no cuDNN here, or not for these shapes
    return True


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
) -> jax.Array:
    """Attention on one device; shapes as in `attention`, `segments` always None."""
    del segments
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=mask.sides(),
        implementation="cudnn",
    )
