"""Rotary position embeddings (Su et al., arXiv:2104.09864), with Llama 3's context scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of low frequencies, with the names of its published configs."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class Rotation(NamedTuple):
    """Angles as (cos, sin), each [batch or 1, seq, 1, head_dim / 2] in fp32."""

    cos: jax.Array
    sin: jax.Array


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """theta^(-2i / head_dim) for i in 0 ... head_dim / 2 - 1, in radians per token.

    With scaling, a frequency whose wavelength 2 pi / f exceeds original / low_freq_factor is
    divided by `factor`, one below original / high_freq_factor is unchanged, and between them the
    two are interpolated by s = (original / wavelength - low) / (high - low).
    """
    f = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return f
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * f / (2 * math.pi)
    s = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - s) * f / scaling.factor + s * f


def rotation(positions: jax.Array, freqs: np.ndarray) -> Rotation:
    """The rotation for `positions` [..., seq] at these frequencies, shared by all layers."""
    angles = positions[..., None, None] * jnp.asarray(freqs, jnp.float32)
    angles = angles.reshape(-1, *angles.shape[-3:])
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate each pair (x_i, x_{i + head_dim/2}) of x [batch, seq, heads, head_dim], as Llama."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    a, b = jnp.split(wide, 2, axis=-1)
    turned = (a * by.cos - b * by.sin, b * by.cos + a * by.sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
