"""8-bit moments, as in bitsandbytes' optimizers (Dettmers et al., arXiv:2110.02861).

A block of 256 consecutive values of a layer has a scale, its largest magnitude. A code is the index
of the value of a dynamic map that is nearest to value / scale: a signed map for first moments, an
unsigned one for second moments.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.placement.codec import AssignsCodecs, Codec, EncodedArray, Role, Stored, pad, unpad
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.specs import by_dim, num_shards
from jaxspeed.quantization.maps import dynamic_map

BLOCK = 256
CODES, SCALES = "codes", "scales"


@dataclass(frozen=True)
class DynamicBlocks(Codec):
    """`value = map[code] * scale` in blocks of the flattened layer, the same on every mesh.

    The codes have the value's shape. The innermost dim of which some `rows` end where a block ends
    orders the scales: those of that many rows stand together, in a dim of their own if there are
    several. Where shards of a dim end inside of a block, the scales are replicated over them.
    """

    signed: bool
    stacked: int = 0  # number of leading dims that stack layers

    @property
    def name(self) -> str:
        kind = "signed" if self.signed else "unsigned"
        return f"8-bit {kind}{' by layer' * bool(self.stacked)}"

    @classmethod
    def named(cls, name: str) -> "DynamicBlocks | None":
        return next((codec for codec in MOMENT_CODECS if codec.name == name), None)

    def _rows(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """(dim, rows of it, number of the blocks that they are)."""
        inner = 1
        for dim in reversed(range(self.stacked, len(shape))):
            rows = BLOCK // math.gcd(BLOCK, inner)
            if dim == self.stacked or shape[dim] % rows == 0:
                return dim, rows, inner * rows // BLOCK
            inner *= shape[dim]
        raise ValueError(f"no dims in {shape}")

    def multiples(self, shape: Sequence[int]) -> Sequence[int]:
        dim, rows, _ = self._rows(shape)
        # A shard of a dim inside of these rows would end inside of a block.
        return [*[1] * dim, rows, *shape[dim + 1 :]]

    def arrays(
        self, padded: Sequence[int], parts: Sequence[int], dtype: Any, shape: Sequence[int]
    ) -> Mapping[str, EncodedArray]:
        dim, rows, blocks = self._rows(shape)
        front, ones = padded[:dim], (1,) * len(padded)
        groups = -(-padded[dim] // rows)
        counts, sizes = (groups, blocks)[: 1 + (blocks > 1)], (rows, 0)[: 1 + (blocks > 1)]
        if padded[dim] % rows and blocks > 1:  # no shard ends where these rows do
            counts, sizes = (-(-math.prod(shape[dim:]) // BLOCK),), (0,)
        return {
            CODES: EncodedArray(tuple(padded), jnp.dtype("uint8"), ones),
            SCALES: EncodedArray((*front, *counts), jnp.dtype("float32"), (*ones[:dim], *sizes)),
        }

    def encode(self, value: jax.Array, shape: Sequence[int], like: Stored) -> Stored:
        value = value.astype(jnp.float32)
        dim, *_ = self._rows(shape)
        largest = _largest(value, dim, shape, like)
        scales = _of_elements(largest, dim, value.shape, shape)
        x = value / jnp.where(scales == 0, 1, scales)  # NaN stays one
        return {CODES: nearest_codes(x, self.signed), SCALES: largest}

    def decode(self, stored: Stored, shape: Sequence[int], dtype: Any) -> jax.Array:
        codes, scales = stored[CODES], stored[SCALES]
        dim, *_ = self._rows(shape)
        scales = _of_elements(scales, dim, codes.shape, shape)
        return (values_of(codes, self.signed) * scales).astype(dtype)

    def repadded(self, stored: Stored, shape: Sequence[int], like: Stored) -> Stored:
        """The same codes: coding again rounds, since the largest number may have no code."""
        dim, *_ = self._rows(shape)
        codes, scales = unpad(stored[CODES], tuple(shape)), stored[SCALES]
        ends = [(0, a - b) for a, b in zip(like[CODES].shape, shape, strict=True)]
        codes = jnp.pad(codes, ends, constant_values=127 if self.signed else 0)
        scales = scales.reshape(*scales.shape[:dim], -1)[tuple(slice(n) for n in shape[:dim])]
        counts = like[SCALES].shape[dim:]
        scales = _resized(scales, math.prod(counts)).reshape(*shape[:dim], *counts)
        return {CODES: codes, SCALES: pad(scales, like[SCALES].shape)}


MOMENT_CODECS = tuple(DynamicBlocks(s, stacked) for s in (True, False) for stacked in (0, 1))


@dataclass(frozen=True)
class MomentRule(AssignsCodecs):
    """The codecs of the moments `mu` (signed) and `nu` of some parameters.

    Attributes:
      stacked: by path of each parameter, its number of leading dims that stack layers.
    """

    stacked: Mapping[str, int]

    def codec_for(self, role: Role, *paths: str) -> Codec | None:
        path, parameter = paths[0], paths[-1]
        if role != "opt" or parameter not in self.stacked:
            return None
        second = path.removesuffix(f"/{parameter}").rpartition("/")[2] == "nu"
        return DynamicBlocks(not second, self.stacked[parameter])


def rule_of_moments(leaves: Iterable[Leaf], least: int) -> MomentRule:
    """The rule of bitsandbytes: parameters of `least` elements or more that are no embeddings.

    Of a stack the elements of one layer count.
    """
    return MomentRule(
        {
            leaf.path: leaf.stacked
            for leaf in leaves
            if math.prod(leaf.shape[leaf.stacked :]) >= least
            and jnp.issubdtype(leaf.dtype, jnp.floating)
            and not is_embedding(leaf)
        }
    )


# The rule of an optimizer whose parameter of this name is not 0: the least size that is encoded.
MOMENT_RULES: dict[str, Callable[[Iterable[Leaf], int], AssignsCodecs]] = {
    "min_8bit_size": rule_of_moments
}


def is_embedding(leaf: Leaf) -> bool:
    """Whether a parameter is the table of an embedding, by the names of its dims or by its path."""
    dims = [name for name in leaf.names if name]
    if dims:
        return dims[0] in ("vocab", "pos")
    *modules, name = leaf.path.lower().split("/")
    if name in ("kernel", "bias", "scale"):
        return False
    return any("embed" in part or part in ("wte", "wpe") for part in (*modules[-1:], name))


def _largest(value: jax.Array, dim: int, shape: Sequence[int], like: Stored) -> jax.Array:
    """The largest magnitude of each block, as `like` has the scales.

    First along the trailing dims, inside of each shard and block: where a shard ends inside of a
    block, devices exchange only these.
    """
    at = getattr(like[CODES], "sharding", None)
    entries = by_dim(at.spec, value.ndim) if at else [None] * value.ndim
    x, size = jnp.abs(value)[(..., *(slice(n) for n in shape[dim + 1 :]))], 1
    for last in reversed(range(dim, value.ndim)):
        n, shards = x.shape[last], num_shards(entries[last], at.mesh.shape) if at else 1
        part = 1 if n % shards else math.gcd(BLOCK // size, n // shards)
        x = x.reshape(*x.shape[:last], n // part, part).max(-1)
        size *= part
        if part < n or last == dim:
            break
        x = x[..., 0]
    front, counts = value.shape[:dim], like[SCALES].shape[dim:]
    x = _resized(x.reshape(*front, -1), math.prod(counts) * BLOCK // size)
    return x.reshape(*front, *counts, BLOCK // size).max(-1)


def _of_elements(
    scales: jax.Array, dim: int, padded: Sequence[int], shape: Sequence[int]
) -> jax.Array:
    """The scale of each element of a padded value: a broadcast, which is local on every mesh."""
    front, inner = padded[:dim], shape[dim + 1 :]
    x = jnp.broadcast_to(scales[..., None], (*scales.shape, BLOCK)).reshape(*front, -1)
    x = _resized(x, padded[dim] * math.prod(inner)).reshape(*front, padded[dim], *inner)
    return pad(x, tuple(padded))


def _resized(x: jax.Array, size: int) -> jax.Array:
    """The last dim padded with zeros, or without its last elements."""
    if x.shape[-1] == size:
        return x
    ends = [(0, 0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1], 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ends)


# -- codes ---------------------------------------------------------------------------------------
#
# Of the numbers from 10^(e - 7) to 10^(e - 6), e from 0 to 6, the signed map has the middles of 2^e
# equal intervals, and the unsigned one of twice as many. With all of these intervals in a row, the
# place of a number among them is the least, and the number at a place the greatest, of seven lines:
# place = slope_e number + first_e.

_LAST = 128  # the number of the value 1, and of the intervals before it


def _lines(signed: bool) -> list[tuple[float, float]]:
    """(slope_e, first_e). Places start at the number of intervals of e = 0."""
    intervals = [2**e if signed else 2 ** (e + 1) for e in range(7)]
    return [(n * 10.0 ** (6 - e) / 0.9, n * 8 / 9) for e, n in enumerate(intervals)]


def nearest_codes(x: jax.Array, signed: bool) -> jax.Array:
    """uint8, the index of the map's value that is nearest to x, the first of equally near ones.

    TPUs, which are slow at lookups in tables, compute the bounds too: there it may be the other one
    of two values where x is in the middle of them but for rounding errors.
    """
    start = 1 if signed else 2
    magnitude = jnp.abs(x)
    place = functools.reduce(jnp.minimum, [magnitude * a + b for a, b in _lines(signed)])
    below = jnp.where(place >= 0, jnp.floor(place), 0)  # and 0 for NaN

    def code_of(number: jax.Array) -> jax.Array:
        number = number.astype(jnp.int32)
        if not signed:
            return jnp.clip(number, 0, 255)
        return jnp.where(x < 0, 127 - jnp.minimum(number, 127), 127 + jnp.clip(number, 0, 128))

    def by_table(x: jax.Array, place: jax.Array, below: jax.Array) -> jax.Array:
        code, bounds = code_of(below - (start - 1)), jnp.asarray(_bounds(signed))
        low, high = (bounds.at[code + i].get(mode="promise_in_bounds") for i in (0, 1))
        return code - (x <= low) + (x > high)

    def by_place(x: jax.Array, place: jax.Array, below: jax.Array) -> jax.Array:
        """The interval of the first value after e changes begins later, that of 1 earlier."""
        number = below.astype(jnp.int32)
        later = jnp.where(number == start, 0.25 - start / 18, 0.2)
        is_first = (number & (number - 1)) == 0
        number -= is_first & (place - below < later)
        number = jnp.where(place > _LAST * start - 0.25, _LAST * start, number)
        return code_of(number - (start - 1))

    code = jax.lax.platform_dependent(x, place, below, tpu=by_place, default=by_table)
    return code.astype(jnp.uint8)


def values_of(codes: jax.Array, signed: bool) -> jax.Array:
    """fp32, the map's values; on TPUs to 1e-6 of each."""

    def by_table(codes: jax.Array) -> jax.Array:
        table = jnp.asarray(dynamic_map(signed))
        return table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")

    def by_place(codes: jax.Array) -> jax.Array:
        number = codes.astype(jnp.int32) - (127 if signed else 0)
        start, size = 1 if signed else 2, jnp.abs(number)
        place = size.astype(jnp.float32) + (start - 0.5)
        code = functools.reduce(jnp.maximum, [(place - b) / a for a, b in _lines(signed)])
        code = jnp.where(size == 0, 0.0, jnp.where(place > _LAST * start, 1.0, code))
        return jnp.where(number < 0, -code, code)

    return jax.lax.platform_dependent(codes, tpu=by_place, default=by_table)


@functools.cache
def _bounds(signed: bool) -> np.ndarray:
    """fp32 [257]: the code c is of the numbers above bounds[c] up to bounds[c + 1].

    They are the middles of two values, rounded down, so that fp32 numbers compare as with exact
    ones.
    """
    table = dynamic_map(signed).astype(np.float64)
    exact = (table[1:] + table[:-1]) / 2
    rounded = exact.astype(np.float32)
    rounded = np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    return np.concatenate([[-np.inf], rounded, [np.inf]], dtype=np.float32)
