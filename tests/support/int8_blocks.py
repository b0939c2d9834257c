"""Codecs of a test's own: 8-bit codes in blocks of a row, each with a scale in fp32."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.placement.codec import Codec, EncodedArray, Stored

MOST = 127


@dataclass(frozen=True)
class Int8Blocks(Codec):
    """`value = code * scale`, by absolute maximum; the last dim has blocks of at most `block`.

    Where a shard is no multiple of a block, blocks are smaller.
    """

    block: int = 4

    @property
    def name(self) -> str:
        return f"int8 blocks of {self.block}"

    @classmethod
    def named(cls, name: str) -> "Int8Blocks | None":
        codec = cls(int(name.split()[-1]))
        return codec if codec.name == name else None

    @property
    def views(self) -> Collection[str]:
        return ("slice", "dynamic_slice", "squeeze")

    def size(self, part: int) -> int:
        """The size of a block in a part of the last dim."""
        return max(n for n in range(1, min(self.block, part) + 1) if part % n == 0)

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        ones = (1,) * (len(padded) - 1)
        block = self.size(padded[-1] // parts[-1])
        scales = (*padded[:-1], -(-padded[-1] // block))
        return {
            "codes": EncodedArray(tuple(padded), jnp.dtype("int8"), (*ones, 1)),
            "scales": EncodedArray(scales, jnp.dtype("float32"), (*ones, block)),
        }

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        *front, count = like["scales"].shape
        blocks = self.blocks(value.astype(jnp.float32), count)
        largest = jnp.abs(blocks).max(-1)
        scales = jnp.where(largest > 0, largest / MOST, 1.0)
        codes = jnp.round(blocks / scales[..., None]).astype(jnp.int8)
        return {"codes": codes.reshape(*front, -1)[..., : value.shape[-1]], "scales": scales}

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        codes, scales = stored["codes"], stored["scales"]
        blocks = self.blocks(codes.astype(jnp.float32), scales.shape[-1]) * scales[..., None]
        return blocks.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]].astype(dtype)

    def per_block(self, size: int) -> int:
        """The size of a block, of rows of so many values for each scale."""
        return size

    def blocks(self, x: jax.Array, count: int) -> jax.Array:
        """[..., count, block], the last one padded."""
        size = self.per_block(-(-x.shape[-1] // count))
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, size * count - x.shape[-1])])
        return x.reshape(*x.shape[:-1], count, size)


@dataclass(frozen=True)
class Int8Rows(Int8Blocks):
    """One scale for a row, which all of its shards share."""

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        codes = super().arrays(padded, parts, dtype, shape)["codes"]
        scales = EncodedArray(codes.shape[:-1], jnp.dtype("float32"), codes.blocks[:-1])
        return {"codes": codes, "scales": scales}

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        one = {"scales": jax.ShapeDtypeStruct((*value.shape[:-1], 1), jnp.float32)}
        found = super().encode(value, shape, one)
        return {**found, "scales": found["scales"][..., 0]}

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        return super().decode({**stored, "scales": stored["scales"][..., None]}, shape, dtype)


@dataclass(frozen=True)
class Int8Leaf(Int8Blocks):
    """Blocks that depend on the unsharded leaf alone, and a factor of the entire leaf.

    The values of a leaf are divided by its number of elements, which padding would change.
    """

    @property
    def name(self) -> str:
        return f"int8 leaf of {self.block}"

    def multiples(self, shape: Sequence[int]) -> Sequence[int]:
        return [*[1] * (len(shape) - 1), self.block]

    def size(self, part: int) -> int:
        return self.block

    per_block = size

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        factor = EncodedArray((1,), jnp.dtype("float32"), (0,))
        return {**super().arrays(padded, parts, dtype, shape), "factor": factor}

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        factor = jnp.full((1,), float(jnp.size(jnp.zeros(shape))), jnp.float32)
        return {**super().encode(value / factor, shape, like), "factor": factor}

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        value = super().decode(stored, shape, jnp.float32)
        return (value * stored["factor"]).astype(dtype)


def rounded(value: Any, codec: Codec) -> jax.Array:
    """A value as the codec stores it on one device."""
    value = jnp.asarray(value)
    arrays = codec.arrays(value.shape, [1] * value.ndim, value.dtype, value.shape)
    return codec.decode(codec.encode(value, value.shape, arrays), value.shape, value.dtype)
