"""Rotary position embeddings (Su et al., arXiv:2104.09864), with scalings for long contexts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of low frequencies, with the names of its published configs.

    A frequency whose wavelength 2 pi / f exceeds original / low_freq_factor is divided by `factor`,
    one below original / high_freq_factor is unchanged, and between them the two are interpolated by
    s = (original / wavelength - low) / (high - low).
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def scaled(self, f: np.ndarray, theta: float) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position_embeddings * f / (2 * math.pi)
        s = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - s) * f / self.factor + s * f

    @property
    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al., arXiv:2306.15595)."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def scaled(self, f: np.ndarray, theta: float) -> np.ndarray:
        return f / self.factor

    @property
    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071), with the names of published configs.

    Frequencies of more than `beta_fast` turns in the original context are unchanged, those of fewer
    than `beta_slow` are divided by `factor`, and those between are interpolated by their number.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of queries and keys; None: 0.1 ln(factor) + 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the numbers between which is interpolated, to integers

    def scaled(self, f: np.ndarray, theta: float) -> np.ndarray:
        count = len(f)

        def number(turns: float) -> float:  # of the frequency with so many turns
            wavelengths = self.original_max_position_embeddings / (2 * math.pi * turns)
            return count * math.log(wavelengths) / math.log(theta)

        low, high = number(self.beta_fast), number(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        high += 0.001 if low == high else 0.0
        s = np.clip((np.arange(count) - low) / (high - low), 0.0, 1.0)
        return (1 - s) * f + s * f / self.factor

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth(1.0)

    def growth(self, scale: float) -> float:
        """0.1 scale ln(factor) + 1: of queries and keys, or of both in one factor of scores."""
        return 0.1 * scale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling by the length L of a batch, as published configs name it.

    Where L exceeds the original context L0, theta is multiplied by r^(d / (d - 2)), with
    r = factor L / L0 - (factor - 1): a frequency f_i by r^(-2i / (d - 2)).
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float
    original_max_position_embeddings: int

    def scaled(self, f: np.ndarray, theta: float) -> np.ndarray:
        return f

    def at_length(self, f: jax.Array, length: jax.Array) -> jax.Array:
        original = self.original_max_position_embeddings
        ratio = self.factor * jnp.maximum(length, original) / original - (self.factor - 1)
        return f * ratio ** (-2 * jnp.arange(len(f)) / (2 * len(f) - 2))

    @property
    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., arXiv:2402.13753): a divisor of each frequency.

    They are `short_factor` for batches within the original context, and `long_factor` beyond.
    """

    rope_type: ClassVar[str] = "longrope"
    factor: float
    original_max_position_embeddings: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float | None = None  # None: sqrt(1 + ln factor / ln original)

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def scaled(self, f: np.ndarray, theta: float) -> np.ndarray:
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != len(f):
                raise ValueError(
                    f"rope_scaling: {name} has {len(getattr(self, name))} factors; the heads have "
                    f"{len(f)} frequencies"
                )
        return f / np.asarray(self.short_factor)

    def at_length(self, f: jax.Array, length: jax.Array) -> jax.Array:
        shorter = np.asarray(self.short_factor) / np.asarray(self.long_factor)
        return f * jnp.where(length > self.original_max_position_embeddings, shorter, 1.0)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        ratio = math.log(self.factor) / math.log(self.original_max_position_embeddings)
        return math.sqrt(1 + ratio) if self.factor > 1 else 1.0


Scaling = RopeScaling | LinearScaling | YarnScaling | DynamicScaling | LongRopeScaling
SCALINGS: dict[str, type[Scaling]] = {
    each.rope_type: each
    for each in (RopeScaling, LinearScaling, YarnScaling, DynamicScaling, LongRopeScaling)
}


def rope_scaling(fields: Mapping[str, Any]) -> Scaling | None:
    """The scaling of a mapping with its fields and `rope_type`, Llama 3's by default.

    Raises:
      ValueError: unknown type or field.
    """
    arguments = {name: value for name, value in fields.items() if name not in ("rope_type", "type")}
    kind = fields.get("rope_type", fields.get("type", "llama3"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ValueError(f"rope_scaling {dict(fields)}: rope_type is {kind!r}; known are {known}")
    names = [field.name for field in dataclasses.fields(SCALINGS[kind])]
    if unknown := [name for name in arguments if name not in names]:
        raise ValueError(f"rope_scaling: {unknown[0]!r} is none of {kind}'s {', '.join(names)}")
    needed = [
        f.name for f in dataclasses.fields(SCALINGS[kind]) if f.default is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in arguments]:
        raise ValueError(f"rope_scaling {dict(fields)}: {kind} needs {' and '.join(missing)}")
    return SCALINGS[kind](**arguments)


class Rotation(NamedTuple):
    """Angles as (cos, sin), each [batch or 1, seq, 1, head_dim / 2] in fp32."""

    cos: jax.Array
    sin: jax.Array


LARGEST_HEAD = 1 << 16


def frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """theta^(-2i / head_dim) for i in 0 ... head_dim / 2 - 1, in radians per token, scaled."""
    if head_dim > LARGEST_HEAD:
        raise ValueError(f"heads of {head_dim:,} dims; rotary embeddings have {LARGEST_HEAD:,}")
    f = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return f if scaling is None else scaling.scaled(f, theta)


def rotation(positions: jax.Array, freqs: np.ndarray, scaling: Scaling | None = None) -> Rotation:
    """The rotation for `positions` [..., seq] at these frequencies, shared by all layers.

    Positions of rank 3 [batch, seq, frequencies] are one of each frequency.
    """
    by_position = jnp.asarray(freqs, jnp.float32)
    if isinstance(scaling, DynamicScaling | LongRopeScaling):
        by_position = scaling.at_length(by_position, jnp.max(positions) + 1)
    if positions.ndim < 3:
        positions = positions[..., None]
    angles = (positions * by_position)[..., None, :]
    angles = angles.reshape(-1, *angles.shape[-3:])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return Rotation(cos, sin) if amplitude == 1 else Rotation(cos * amplitude, sin * amplitude)


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate each pair (x_i, x_{i + n/2}) of x [batch, seq, heads, head_dim], as Llama.

    The n / 2 angles of a rotation rotate the first n dims of a head; the others are unchanged.
    """
    count = 2 * by.cos.shape[-1]
    if count < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :count], by), x[..., count:]], axis=-1)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    a, b = jnp.split(wide, 2, axis=-1)
    turned = (a * by.cos - b * by.sin, b * by.cos + a * by.sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotate_neighbours(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate each pair (x_2i, x_{2i + 1}) of the first n dims, as GLM and GPT-J."""
    count = 2 * by.cos.shape[-1]
    if count < x.shape[-1]:
        turned = rotate_neighbours(x[..., :count], by)
        return jnp.concatenate([turned, x[..., count:]], axis=-1)
    pairs = x.reshape(*x.shape[:-1], count // 2, 2)
    turned = rotate(pairs.swapaxes(-1, -2).reshape(x.shape), by)
    return turned.reshape(*x.shape[:-1], 2, count // 2).swapaxes(-1, -2).reshape(x.shape)
