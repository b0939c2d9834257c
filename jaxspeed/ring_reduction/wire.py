"""What travels round a ring in the place of numbers: themselves, bf16, or int8 in blocks.

A `Wire` packs an array [length] into one array, which is one message, and unpacks it again. int8
sends one byte a number and four a block: x is rounded to scale * q with scale = max|x| / 127 over
the block. A block that holds what is not finite is not finite after it either, so that a step that
has to be skipped still is.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 256  # numbers that share a scale
Word = Literal["none", "bf16", "int8"]


class Wire(Protocol):
    """How arrays [length] are sent."""

    @property
    def feedback(self) -> bool:
        """Whether what packing loses is to be kept, and added to what is sent the next time."""

    def pack(self, x: Array) -> Array:
        """The message."""

    def unpack(self, message: Array, like: Array) -> Array:
        """What was packed, with the shape and dtype of `like`."""


@dataclass(frozen=True)
class AsItIs:
    """The numbers themselves."""

    feedback = False

    def pack(self, x: Array) -> Array:
        return x

    def unpack(self, message: Array, like: Array) -> Array:
        return message


@dataclass(frozen=True)
class Rounded:
    """bf16: the exponent is fp32's own, so that nothing overflows and nothing needs a scale.

    Sent as the bits that it is: XLA:CPU widens what bf16 its collectives carry (jax 0.10.2).
    """

    feedback = False

    def pack(self, x: Array) -> Array:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def unpack(self, message: Array, like: Array) -> Array:
        return lax.bitcast_convert_type(message, jnp.bfloat16).astype(like.dtype)


@dataclass(frozen=True)
class Blocks:
    """int8 with a scale in fp32 for each block."""

    feedback = True
    block: int = BLOCK

    def pack(self, x: Array) -> Array:
        """[length] -> int8 [blocks * (block + 4)]: the numbers, then the bytes of the scales."""
        blocks = -(-x.size // self.block)
        x = jnp.pad(x.astype(jnp.float32), (0, blocks * self.block - x.size))
        x = x.reshape(blocks, self.block)
        scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
        # A block of zeros is sent as such; 0 / 0 would not be.
        q = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
        return jnp.concatenate([q.reshape(-1), lax.bitcast_convert_type(scale, jnp.int8).ravel()])

    def unpack(self, message: Array, like: Array) -> Array:
        blocks = -(-like.size // self.block)
        q, scale = jnp.split(message, [blocks * self.block])
        scale = lax.bitcast_convert_type(scale.reshape(blocks, 1, 4), jnp.float32)
        x = q.reshape(blocks, self.block).astype(jnp.float32) * scale
        return x.reshape(-1)[: like.size].astype(like.dtype)


WIRES: dict[Word, Wire] = {"none": AsItIs(), "bf16": Rounded(), "int8": Blocks()}
