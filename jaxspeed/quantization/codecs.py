"""Codecs of a frozen base: NF4 and FP4 in blocks, int8 in rows; the codes are bitsandbytes'.

A weight is [*stack, *inputs, *outputs], as Flax has it: stacked layers and experts, the dims that
its product contracts, its output features. Hugging Face's tensor is one matrix [out, in] of it, in
which dims are flattened in this order. Blocks are runs of 64 values of a row of that matrix, the
last one of a row may be shorter; so codes depend on neither the mesh nor the stack.

    codes    of NF4 and FP4: two neighbours along the inputs in a byte, the first in its upper half
    scales   the largest magnitude of each block (of each row for int8), as fp32 or as 8-bit codes
    groups   the largest magnitude of 256 scales, in the order of [out, in / 64], less the offset
    offset   the mean of a matrix's scales

The second level's groups and offset are those of one leaf. Where a Hugging Face tensor is several
leaves (GPT-2's c_attn, Phi-3's qkv_proj), their codes and scales are the tensor's, and the second
level is each leaf's own.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.placement.codec import Codec, EncodedArray, Plain, Stored
from jaxspeed.quantization.maps import TABLES, borders, dynamic_map
from jaxspeed.quantization.moments import DynamicBlocks

GROUP = 256  # scales of the second level that share one
_FP32, _UINT8 = jnp.dtype("float32"), jnp.dtype("uint8")
Values = Literal["nf4", "fp4"]
_OF_DIMS = r"(?: of (\d+) x (\d+) dims)?"
_PER_LAYER = ("slice", "dynamic_slice", "squeeze")


@dataclass(frozen=True)
class MatrixCodec(Codec):
    """A codec of weights [*stack, *inputs, *outputs], by the numbers of their last dims."""

    inputs: int = 1
    outputs: int = 1

    @property
    def views(self) -> Collection[str]:
        return _PER_LAYER

    @property
    def _dims(self) -> str:
        return (
            "" if self.inputs == self.outputs == 1 else f" of {self.inputs} x {self.outputs} dims"
        )

    def stack(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[: len(shape) - self.inputs - self.outputs])

    def ins(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[len(shape) - self.inputs - self.outputs : len(shape) - self.outputs])

    def outs(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[len(shape) - self.outputs :])

    def repadded(self, stored: Stored, shape: Sequence[int], like: Stored) -> Stored:
        def moved(x: jax.Array, wanted: Sequence[int]) -> jax.Array:
            return _padded_to(x[tuple(map(slice, wanted))], wanted)

        return {name: moved(x, like[name].shape) for name, x in stored.items()}

    def rows(self, x: jax.Array) -> jax.Array:
        """A weight as [*stack, in, *outputs]."""
        return x.reshape(*self.stack(x.shape), math.prod(self.ins(x.shape)), *self.outs(x.shape))


@dataclass(frozen=True)
class FourBit(MatrixCodec):
    """NF4 or FP4 in blocks, whose scales are quantized again if `double`."""

    values: Values = "nf4"
    block: int = 64
    double: bool = True

    @property
    def name(self) -> str:
        twice = " double" if self.double else ""
        return f"{self.values} blocks of {self.block}{twice}{self._dims}"

    @classmethod
    def named(cls, name: str) -> "FourBit | None":
        found = re.fullmatch(rf"(nf4|fp4) blocks of (\d+)( double)?{_OF_DIMS}", name)
        if found is None:
            return None
        values, block, double, inputs, outputs = found.groups("")
        of = int(inputs or 1), int(outputs or 1)
        return cls(*of, cast(Values, values), int(block), bool(double))

    def multiples(self, shape: Sequence[int]) -> Sequence[int]:
        inner = self.ins(shape)[1:]
        heads = self._group(shape)[0]
        # Inner dims of several, such as the size of heads, are not sharded.
        return [
            *[1] * len(self.stack(shape)),
            *([heads, *[math.prod(shape)] * len(inner)] if inner else [self.block]),
            *[1] * self.outputs,
        ]

    def _group(self, shape: Sequence[int]) -> tuple[int, int]:
        """(elements of the first input dim that have a number of blocks, that number)."""
        size = math.prod(self.ins(shape)[1:])
        together = math.lcm(size, self.block)
        return together // size, together // self.block

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        stack, (first, *inner), outs = self.stack(padded), self.ins(padded), self.outs(padded)
        ones = (1,) * len(stack)
        *outer, last = (first, *inner)
        codes = (*stack, *outer, -(-last // 2), *outs)
        of_codes = (*ones, *[1] * len(outer), 2, *[1] * len(outs))
        share, blocks = self._group(shape)
        along = [-(-first // share), *([blocks] if inner else [])]
        along += [1] * (self.inputs - len(along))
        of_scales = (*ones, share, *[0] * len(inner), *[1] * len(outs))
        scales = (*stack, *along, *outs)
        found = {
            "codes": EncodedArray(codes, _UINT8, of_codes),
            "scales": EncodedArray(scales, _UINT8 if self.double else _FP32, of_scales),
        }
        if self.double:
            number = -(-self._blocks_in(shape) * math.prod(self.outs(shape)) // GROUP)
            found["groups"] = EncodedArray((*stack, number), _FP32, (*ones, 0))
            found["offset"] = EncodedArray(stack, _FP32, ones)
        return found

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        axis = len(self.stack(shape))
        rows = self.rows(value.astype(_FP32))  # [*stack, in, *outputs]
        blocks = _split(rows, axis, -(-rows.shape[axis] // self.block), self.block)
        scales = jnp.abs(blocks).max(axis + 1)
        codes = _nearest4(self.values, blocks * jnp.expand_dims(_inverse(scales), axis + 1))
        codes = _merged(codes, axis, rows.shape[axis]).reshape(value.shape)
        pair = axis + self.inputs - 1
        if codes.shape[pair] % 2:
            zero = jnp.full((*codes.shape[:pair], 1, *codes.shape[pair + 1 :]), self._zero)
            codes = jnp.concatenate([codes, zero], pair)
        pairs = _split(codes, pair, codes.shape[pair] // 2, 2)
        upper, lower = (jax.lax.index_in_dim(pairs, i, pair + 1, False) for i in (0, 1))
        stored = {"codes": (upper << 4) | lower}
        if self.double:
            scales, stored["groups"], stored["offset"] = self._second_level(scales, shape)
        target = like["scales"].shape
        scales = _padded(scales, axis, math.prod(self.ins(target)))
        return {**stored, "scales": scales.reshape(target)}

    def _second_level(
        self, scales: jax.Array, shape: Sequence[int]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(codes, groups, offset) of scales [*stack, blocks, *outputs]."""
        own, outs, front = self._blocks_in(shape), self.outs(shape), len(self.stack(shape))
        flat = scales[(..., slice(own), *map(slice, outs))]
        stack = flat.shape[:front]
        flat = jnp.swapaxes(flat.reshape(*stack, own, -1), -1, -2).reshape(*stack, -1)
        offset = _mean(flat)
        number = flat.shape[-1]
        groups = _split(flat - offset[..., None], front, -(-number // GROUP), GROUP)
        largest = jnp.abs(groups).max(-1)
        codes = nearest8(groups * _inverse(largest)[..., None])
        codes = _merged(codes, front, number).reshape(*stack, -1, own)
        codes = jnp.swapaxes(codes, -1, -2).reshape(*stack, own, *outs)
        return _padded_to(codes, scales.shape), largest, offset

    @property
    def _zero(self) -> np.uint8:
        return np.uint8(list(TABLES[self.values]).index(0))

    def _blocks_in(self, shape: Sequence[int]) -> int:
        """Blocks of a row of the matrix, without padding."""
        return -(-math.prod(self.ins(shape)) // self.block)

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        bytes_, axis = stored["codes"], len(self.stack(shape))
        pair = axis + self.inputs - 1
        # The last byte of an odd number has one value. Only the first input dim has padding.
        size = 2 * bytes_.shape[pair] if self.inputs == 1 else shape[pair]
        # Bytes are repeated, and codes selected by their place: XLA:TPU moves an interleaving of
        # codes below the selection of values, where it is several copies of the weight in fp32.
        twice = jnp.stack([bytes_, bytes_], pair + 1)
        twice = _merged(twice, pair, size)
        place = jnp.arange(size).astype(jnp.uint8) + _zero_of(bytes_)
        odd = place.reshape(size, *[1] * (twice.ndim - pair - 1)) & 1
        codes = jnp.where(odd == 0, twice >> 4, twice & 15)
        rows = self.rows(codes)
        scales = self._scales(stored, shape)
        blocks = _split(rows, axis, scales.shape[axis], self.block)
        value = _value4(self.values, blocks) * jnp.expand_dims(scales, axis + 1)
        return _merged(value.astype(dtype), axis, rows.shape[axis]).reshape(codes.shape)

    def _scales(self, stored: Stored, shape: Sequence[int]) -> jax.Array:
        """The scales [*stack, blocks, *outputs] of a padded weight."""
        scales = self.rows(stored["scales"])
        if not self.double:
            return scales
        own, outs, groups = self._blocks_in(shape), self.outs(shape), stored["groups"]
        stack = groups.shape[:-1]
        # For each scale its group's, from groups that every shard has: nothing is communicated.
        spread = jnp.broadcast_to(groups[..., None], (*groups.shape, GROUP)).reshape(*stack, -1)
        spread = spread[..., : own * math.prod(outs)].reshape(*stack, -1, own)
        spread = jnp.swapaxes(spread, -1, -2).reshape(*stack, own, *outs)
        offset = stored["offset"].reshape(*stack, *[1] * (1 + len(outs)))
        return value8(scales) * _padded_to(spread, scales.shape) + offset


@dataclass(frozen=True)
class RowInt8(MatrixCodec):
    """8-bit integers, of which 127 is the largest magnitude of a row of [out, in]."""

    @property
    def name(self) -> str:
        return f"int8 rows{self._dims}"

    @classmethod
    def named(cls, name: str) -> "RowInt8 | None":
        found = re.fullmatch(f"int8 rows{_OF_DIMS}", name)
        return None if found is None else cls(*(int(n or 1) for n in found.groups()))

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        ones = (1,) * len(padded)
        stack, outs = self.stack(padded), self.outs(padded)
        scales, front = (*stack, *[1] * self.inputs, *outs), (1,) * len(stack)
        of_scales = (*front, *[0] * self.inputs, *[1] * len(outs))
        return {
            "codes": EncodedArray(tuple(padded), jnp.dtype("int8"), ones),
            "scales": EncodedArray(scales, _FP32, of_scales),
        }

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        value, axis = value.astype(_FP32), len(self.stack(shape))
        dims = tuple(range(axis, axis + self.inputs))
        scales = jnp.abs(value).max(dims, keepdims=True)
        codes = jnp.round(value * jnp.where(scales > 0, 127 / scales, 0))
        return {"codes": codes.astype(jnp.int8), "scales": scales}

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        value = stored["codes"].astype(_FP32) * stored["scales"]
        return (value * np.float32(1 / 127)).astype(dtype)


@dataclass(frozen=True)
class Reordered(Codec):
    """The codec of a weight with its last dims in another order, such as [out, in] of x W^T.

    Attributes:
      codec: of the weight [*stack, *inputs, *outputs].
      order: for each of these inputs and outputs which of the weight's last dims it is.
    """

    codec: MatrixCodec
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.codec.name} in order {' '.join(map(str, self.order))}"

    @property
    def views(self) -> Collection[str]:
        return self.codec.views

    def _dims(self, count: int) -> tuple[int, ...]:
        """The weight's dims in the codec's order."""
        stack = count - len(self.order)
        return (*range(stack), *(stack + d for d in self.order))

    def _to(self, sizes: Sequence[int]) -> list[int]:
        return [sizes[d] for d in self._dims(len(sizes))]

    def _from(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[d] for d in np.argsort(self._dims(len(sizes))))

    def multiples(self, shape: Sequence[int]) -> Sequence[int]:
        return self._from(self.codec.multiples(self._to(shape)))

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        found = self.codec.arrays(self._to(padded), self._to(parts), dtype, self._to(shape))
        return {
            name: x._replace(shape=self._from(x.shape), blocks=self._from(x.blocks))
            if len(x.shape) == len(shape)
            else x  # of a stack of weights
            for name, x in found.items()
        }

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        count, dims = value.ndim, self._dims(value.ndim)

        def to(x: Any) -> Any:
            own = len(x.shape) == count
            return jax.ShapeDtypeStruct(self._to(x.shape), x.dtype) if own else x

        given = {name: to(x) for name, x in like.items()}
        found = self.codec.encode(value.transpose(dims), self._to(shape), given)
        return _each_of(found, count, np.argsort(dims))

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        dims = self._dims(len(shape))
        value = self.codec.decode(_each_of(stored, len(shape), dims), self._to(shape), dtype)
        return value.transpose(np.argsort(dims))

    def repadded(self, stored: Stored, shape: Sequence[int], like: Stored) -> Stored:
        return self.codec.repadded(stored, shape, like)


def _each_of(stored: Stored, count: int, dims: Any) -> Stored:
    """The arrays of so many dims with their dims in this order, the others unchanged."""
    return {name: x.transpose(dims) if x.ndim == count else x for name, x in stored.items()}


# The codecs that checkpoints may name, by how their names start.
CODECS: dict[str, type[Codec]] = {
    "plain": Plain,
    "nf4": FourBit,
    "fp4": FourBit,
    "int8 rows": RowInt8,
    "8-bit": DynamicBlocks,
}


def codec_named(name: str) -> Codec | None:
    """The codec of this name; None if it is not one of these."""
    own, ordered, order = name.partition(" in order ")
    starts = (kind for start, kind in CODECS.items() if own.startswith(start))
    codec = next((codec for kind in starts if (codec := kind.named(own))), None)
    if not ordered:
        return codec
    dims = order.split(" ")
    if not isinstance(codec, MatrixCodec) or not all(map(str.isdecimal, dims)):
        return None
    return Reordered(codec, tuple(map(int, dims)))


# -- codes and their values ------------------------------------------------------------------------


def _nearest4(values: str, x: jax.Array) -> jax.Array:
    """The codes of numbers from -1 to 1; of two as near the lower one, as in bitsandbytes."""
    table = TABLES[values]
    order = np.argsort(table, kind="stable")
    middle = (table[order[:-1]] + table[order[1:]]) / np.float32(2)
    codes = jnp.full(x.shape, order[0], jnp.uint8)
    for border, step in zip(middle, np.diff(order.astype(np.uint8)), strict=True):
        codes = codes + jnp.where(x > border, step, np.uint8(0))
    return codes


def _value4(values: str, codes: jax.Array) -> jax.Array:
    """The values of codes, by four levels of selections: cheaper than a lookup on a TPU."""
    nothing = _zero_of(codes).astype(_FP32)
    found: list[Any] = [nothing + number for number in TABLES[values]]
    for bit in range(4):
        on = (codes >> bit) & 1 != 0
        found = [jnp.where(on, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
    value: jax.Array = found[0]
    return value


def nearest8(x: jax.Array, signed: bool = True) -> jax.Array:
    """The codes of the nearest values of a dynamic map; of two as near the lower one."""
    return jnp.searchsorted(jnp.asarray(borders(dynamic_map(signed))), x).astype(jnp.uint8)


def value8(codes: jax.Array) -> jax.Array:
    """The values of codes of the signed dynamic map, in fp32, to a rounding.

    Between powers of two, counted from zero, they are equally spaced: a few selections and a
    product are cheap everywhere, a lookup of each code is slow on TPUs.
    """
    table, zero = dynamic_map().astype(np.float64), 127
    place = codes.astype(jnp.int32) - zero
    steps = jnp.abs(place)
    nothing = _zero_of(codes).astype(_FP32)
    first = spacing = start = jnp.broadcast_to(nothing, codes.shape)
    for low in (1, 2, 4, 8, 16, 32, 64, 128):
        high = min(2 * low, 128)
        ends = table[zero + low], table[zero + high - 1]
        apart = (ends[1] - ends[0]) / (high - 1 - low) if high - 1 > low else 0.0
        on = steps >= low
        first = jnp.where(on, nothing + np.float32(low), first)
        spacing = jnp.where(on, nothing + np.float32(apart), spacing)
        start = jnp.where(on, nothing + np.float32(ends[0]), start)
    value = start + spacing * (steps.astype(jnp.float32) - first)
    return jnp.where(place < 0, -value, value)


def _zero_of(codes: jax.Array) -> jax.Array:
    """Zero that depends on the codes, for the constants of a decoder.

    JAX computes what depends on no slice of a scan before the scan, and XLA:GPU keeps it there: 16
    fp32 arrays of the shape of every weight of a layer. XLA folds this zero.
    """
    return codes[(0,) * codes.ndim] & 0


def _inverse(scales: jax.Array) -> jax.Array:
    return 1 / jnp.where(scales > 0, scales, 1)


def _mean(x: jax.Array) -> jax.Array:
    """The mean along the last dim, by sums of pairs: in an order that no sharding changes.

    Without the last bit: XLA would fuse the product with the subtraction that reads it in some
    programs, and not round it there.
    """
    number = x.shape[-1]
    size = 1 << (number - 1).bit_length()
    x = _padded(x, x.ndim - 1, size)
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    mean = x[..., 0] * np.float32(1 / number)
    return jax.lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=22)


# -- dims ------------------------------------------------------------------------------------------


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    return _padded_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def _padded_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, shape, strict=True)])


def _split(x: jax.Array, axis: int, number: int, size: int) -> jax.Array:
    """A dim as two, of so many parts of a size, the last one padded."""
    x = _padded(x, axis, number * size)
    return x.reshape(*x.shape[:axis], number, size, *x.shape[axis + 1 :])


def _merged(x: jax.Array, axis: int, size: int) -> jax.Array:
    """The inverse of `_split`, without padding."""
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, size, axis=axis)
