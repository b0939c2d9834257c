"""cuDNN's fused attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.ops.mask import Mask, Segments
from jaxspeed.ops.two_passes import gradients_from, saved_sums

ASSUMED_VERSION = 91300  # in the CUDA wheels that jaxspeed[cuda] installs


def supports(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, mask: Mask
) -> bool:
    """Whether the installed cuDNN supports these shapes, dtypes and masks.

    Segments would need a bias of [batch, 1, seq, seq], whose gradient cuDNN computes too; they go
    to the plain kernel. The rest is checked by JAX.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or segments is not None:
        return False
    if mask.window is not None and not mask.causal:
        return False  # cuDNN's window looks back only
    try:
        attend = functools.partial(_attend, mask=mask, scale=1.0)
        jax.eval_shape(lambda *qkv: jax.vjp(attend, *qkv)[0], q, k, v)
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # no cuDNN, or unsupported shapes
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
    return saved_sums(functools.partial(_attend, mask=mask, scale=scale), (q, k, v))


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
    """The gradients of q, k and v, from the results of `forward`."""
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
    """Context in which cuDNN's attention is traced although cuDNN is not installed.

    JAX checks the installed cuDNN's version and the device's compute capability before it traces
    cuDNN's attention (`jax._src.cudnn`, jax 0.10.2 to 0.12.0). If that module has changed, `plain`
    is traced, which materializes the scores.
    """
    checks = _checks()
    if checks is None:
        yield
        return
    before = (checks.check_cudnn_version, checks.check_compute_capability)
    checks.check_cudnn_version = _assumed_version
    checks.check_compute_capability = lambda capability: True
    try:
        yield
    finally:
        checks.check_cudnn_version, checks.check_compute_capability = before


def is_assumed() -> bool:
    """Whether `assumed` is active: the same attention is traced differently then."""
    checks = _checks()
    return checks is not None and checks.check_cudnn_version is _assumed_version


def _checks() -> Any:
    """JAX's module with the checks; None if it has changed."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as checks
    except ImportError:
        return None
    names = ("check_cudnn_version", "check_compute_capability")
    return checks if all(hasattr(checks, name) for name in names) else None


def _assumed_version() -> int:
    return ASSUMED_VERSION
