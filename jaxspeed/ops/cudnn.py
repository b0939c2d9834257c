"""cuDNN's fused attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.ops.mask import Mask, Segments
from jaxspeed.ops.two_passes import gradients_from, sums_kept

ASSUMED = 91300  # the version in the CUDA wheels that jaxspeed[cuda] installs


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
        attend = functools.partial(_attend, mask=mask, scale=1.0)
        jax.eval_shape(lambda *qkv: jax.vjp(attend, *qkv)[0], q, k, v)
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # no cuDNN here, or not for these shapes
    return True


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    mask: Mask,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp of each query's scores [batch, heads, seq]); no segments."""
    del segments
    # `return_residual` would round the sums to the dtype of q (jax 0.10.2).
    return sums_kept(functools.partial(_attend, mask=mask, scale=scale), (q, k, v))


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    sums: jax.Array,
    d_out: jax.Array,
    *,
    mask: Mask,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, from what `forward` gave."""
    del segments
    attend = functools.partial(_attend, mask=mask, scale=scale)
    return gradients_from(attend, (q, k, v), (out, sums), d_out)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, scale: float) -> jax.Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=mask.sides(),
        implementation="cudnn",
    )


@contextmanager
def assumed() -> Iterator[None]:
    """What is traced inside takes cuDNN's attention although no cuDNN is here.

    JAX asks the installed cuDNN for its version, and the device for what it can, before it traces
    cuDNN's attention (`jax._src.cudnn`, jax 0.10.2 to 0.12.0). Where that module has changed the
    trace goes the plain way, and holds the scores.
    """
    asked = _asked()
    if asked is None:
        yield
        return
    before = (asked.check_cudnn_version, asked.check_compute_capability)
    asked.check_cudnn_version = _assumed_version
    asked.check_compute_capability = lambda capability: True
    try:
        yield
    finally:
        asked.check_cudnn_version, asked.check_compute_capability = before


def is_assumed() -> bool:
    """Whether this is inside of `assumed`: there the same attention is traced otherwise."""
    asked = _asked()
    return asked is not None and asked.check_cudnn_version is _assumed_version


def _asked() -> Any:
    """The module of JAX that asks; None where it has changed."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as asked
    except ImportError:
        return None
    names = ("check_cudnn_version", "check_compute_capability")
    return asked if all(hasattr(asked, name) for name in names) else None


def _assumed_version() -> int:
    return ASSUMED
