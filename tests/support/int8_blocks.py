"""A codec of a test's own: 8-bit codes in blocks of a row, each with a scale in fp32."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.placement.codec import Codec, Stored

MOST = 127


@dataclass(frozen=True)
class Int8Blocks(Codec):
    """`value = code * scale`, by absolute maximum; the last dim has blocks of at most `block`."""

    block: int = 4

    @property
    def name(self) -> str:
        return f"int8 blocks of {self.block}"

    @property
    def views(self) -> Collection[str]:
        return ("slice", "dynamic_slice", "squeeze")

    def arrays(self, shape: Sequence[int], parts: Sequence[int], dtype: Any) -> Stored:
        scales = list(shape)
        if shape:
            part = shape[-1] // parts[-1]
            scales[-1] //= max(n for n in range(1, min(self.block, part) + 1) if part % n == 0)
        return {
            "codes": jax.ShapeDtypeStruct(tuple(shape), jnp.int8),
            "scales": jax.ShapeDtypeStruct(tuple(scales), jnp.float32),
        }

    def encode(self, value: jax.Array, like: Stored) -> Stored:
        shape = like["scales"].shape
        blocks = value.astype(jnp.float32).reshape(*shape, -1)
        largest = jnp.abs(blocks).max(-1)
        scales = jnp.where(largest > 0, largest / MOST, 1.0)
        codes = jnp.round(blocks / scales[..., None]).astype(jnp.int8)
        return {"codes": codes.reshape(value.shape), "scales": scales}

    def decode(self, stored: Stored, dtype: Any) -> jax.Array:
        codes, scales = stored["codes"], stored["scales"]
        blocks = codes.astype(jnp.float32).reshape(*scales.shape, -1)
        return (blocks * scales[..., None]).reshape(codes.shape).astype(dtype)


@dataclass(frozen=True)
class Int8Rows(Int8Blocks):
    """One scale for a row, which all of its shards share."""

    def arrays(self, shape: Sequence[int], parts: Sequence[int], dtype: Any) -> Stored:
        codes = super().arrays(shape, parts, dtype)["codes"]
        scales = jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32)
        return {"codes": codes, "scales": scales}


def rounded(value: Any, codec: Codec) -> jax.Array:
    """A value as the codec stores it on one device."""
    value = jnp.asarray(value)
    like = codec.arrays(value.shape, [1] * value.ndim, value.dtype)
    return codec.decode(codec.encode(value, like), value.dtype)
