"""How many bytes an array takes on a device.

A TPU's memory holds tiles of 8 x 128 elements, over the two dims that its layout puts last (XLA
writes T(8,128); of 16-bit numbers two share a word, T(8,128)(2,1), and shorter columns have tiles
of 4, 2 and 1 rows). The compiler chooses a layout that wastes little, of arguments too: here the
dim that fills its lanes best is last.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.planner.memory.partitioning import ways
from jaxspeed.planner.memory.trace_ir import Value

LANES, ROWS = 128, 8


@dataclass
class Sizes:
    """Bytes of values on a device."""

    mesh: Mapping[str, int]
    tiled: bool
    narrow: frozenset[Value] = frozenset()  # fp32 that is stored in 16 bits
    library: bool = False  # products are a library's kernels, into which nothing is fused

    def of(self, value: Value) -> int:
        dtype = jnp.bfloat16 if value in self.narrow else value.dtype
        return nbytes(local_shape(value, self.mesh), dtype, self.tiled and not value.host)

    def plain(self, value: Value) -> int:
        """As it is sent: without tiles."""
        return nbytes(local_shape(value, self.mesh), value.dtype, False)

    def cut(self, value: Value) -> list[tuple[str, ...]]:
        return [tuple(a for a in entry if self.mesh[a] > 1) for entry in value.cut]


def local_shape(value: Value, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Of one device's part."""
    pairs = zip(value.shape, ways(value, mesh), strict=True)
    return tuple(-(-n // parts) for n, parts in pairs)


def nbytes(shape: Sequence[int], dtype: Any, tiled: bool) -> int:
    """Bytes of an array on a device; `tiled` where its memory holds tiles."""
    width = _width(dtype)
    if not tiled or not shape:
        return math.prod(shape) * width
    return min(_in_tiles(shape, last) for last in range(len(shape))) * width


def _in_tiles(shape: Sequence[int], last: int) -> int:
    rest = [n for d, n in enumerate(shape) if d != last]
    columns = _up(shape[last], LANES)
    if not rest:
        return columns
    rows = min(
        _up(rest[-1], _rows(rest[-1])), *(_up(n, _rows(n)) * rest[-1] // n for n in rest if n)
    )
    return columns * math.prod(rest) * rows // max(rest[-1], 1)


def _rows(n: int) -> int:
    return min(ROWS, 1 << max(n - 1, 0).bit_length())


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _width(dtype: Any) -> int:
    if dtype is None:
        return 0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return max(1, jnp.dtype(dtype).itemsize)
