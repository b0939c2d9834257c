"""Bytes of an array in device memory, with a TPU's tiles and padding.

A TPU stores the two minor dims of an array in tiles of 8 x 128 elements (XLA writes T(8,128);
16-bit numbers are packed in pairs, T(8,128)(2,1), and fewer rows have tiles of 4, 2 and 1 rows).
The compiler chooses layouts with little padding, for arguments too: here the minor dim is the one
that needs the least.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.communication import dtype_text
from jaxspeed.planner.memory.partitioning import shards_per_dim
from jaxspeed.planner.memory.trace_ir import Value

COLUMNS, ROWS = 128, 8


@dataclass
class Sizes:
    """Bytes of values per device."""

    mesh: Mapping[str, int]
    tiled: bool
    narrow: frozenset[Value] = frozenset()  # fp32 that is stored in 16 bits
    library: bool = False  # matmuls are library kernels, into which nothing is fused

    def of(self, value: Value) -> int:
        dtype = jnp.bfloat16 if value in self.narrow else value.dtype
        return nbytes(local_shape(value, self.mesh), dtype, self.tiled and not value.host)

    def plain(self, value: Value) -> int:
        """Bytes without tiles, as in a message."""
        return nbytes(local_shape(value, self.mesh), value.dtype, False)


def local_shape(value: Value, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's shard."""
    pairs = zip(value.shape, shards_per_dim(value, mesh), strict=True)
    return tuple(-(-n // shards) for n, shards in pairs)


def array_text(value: Value, mesh: Mapping[str, int]) -> str:
    """`bf16[4096,14336]`: one device's shard."""
    return f"{dtype_text(value.dtype)}[{','.join(map(str, local_shape(value, mesh)))}]"


@cache
def nbytes(shape: tuple[int, ...], dtype: Any, tiled: bool) -> int:
    """Bytes of an array; `tiled` where device memory stores tiles."""
    width = _width(dtype)
    if not tiled or not shape:
        return math.prod(shape) * width
    return min(_in_tiles(shape, last) for last in range(len(shape))) * width


def _in_tiles(shape: Sequence[int], last: int) -> int:
    rest = [n for d, n in enumerate(shape) if d != last]
    columns = _up(shape[last], COLUMNS)
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
