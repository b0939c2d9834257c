"""Message formats of the ring (`parallel.ring_wire`): uncompressed, bf16, or block-quantized int8.

A `Wire` packs an array [length] into one array, which is one message, and unpacks it. int8 sends
one byte per number and four per block: x is rounded to scale * q with scale = max|x| / 127 over the
block. A non-finite block stays non-finite, so that a step that must be skipped still is.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 256  # numbers that share a scale
WireName = Literal["none", "bf16", "int8"]


class Wire(Protocol):
    """A format in which arrays [length] are sent."""

    @property
    def feedback(self) -> bool:
        """Whether packing errors are saved and added to the next message (error feedback)."""

    def pack(self, x: Array) -> Array:
        """Encode as one message."""

    def unpack(self, message: Array, like: Array) -> Array:
        """Decode to the shape and dtype of `like`."""


@dataclass(frozen=True)
class Uncompressed:
    """Values in their own dtype."""

    feedback = False

    def pack(self, x: Array) -> Array:
        return x

    def unpack(self, message: Array, like: Array) -> Array:
        return message


@dataclass(frozen=True)
class RoundedToBf16:
    """bf16: the exponent range of fp32, so nothing overflows and no scale is needed.

    Sent as uint16 bits: XLA:CPU widens bf16 in its collectives (jax 0.11.2, 0.12.0.1).
    """

    feedback = False

    def pack(self, x: Array) -> Array:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def unpack(self, message: Array, like: Array) -> Array:
        return lax.bitcast_convert_type(message, jnp.bfloat16).astype(like.dtype)


@dataclass(frozen=True)
class BlockInt8:
    """int8 with an fp32 scale per block."""

    feedback = True
    block: int = BLOCK

    def pack(self, x: Array) -> Array:
        """[length] -> int8 [blocks * (block + 4)]: the numbers, then the bytes of the scales."""
        blocks = -(-x.size // self.block)
        x = jnp.pad(x.astype(jnp.float32), (0, blocks * self.block - x.size))
        x = x.reshape(blocks, self.block)
        scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
        # A block of zeros stays zero instead of 0 / 0.
        q = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
        return jnp.concatenate([q.reshape(-1), lax.bitcast_convert_type(scale, jnp.int8).ravel()])

    def unpack(self, message: Array, like: Array) -> Array:
        blocks = -(-like.size // self.block)
        q, scale = jnp.split(message, [blocks * self.block])
        scale = lax.bitcast_convert_type(scale.reshape(blocks, 1, 4), jnp.float32)
        x = q.reshape(blocks, self.block).astype(jnp.float32) * scale
        return x.reshape(-1)[: like.size].astype(like.dtype)


WIRES: dict[WireName, Wire] = {"none": Uncompressed(), "bf16": RoundedToBf16(), "int8": BlockInt8()}
