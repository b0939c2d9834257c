"""Bytes of an array in device memory, with a TPU's tiles and padding.

A TPU stores the two minor dims of an array in tiles of 8 x 128 elements (XLA writes T(8,128);
16-bit numbers are packed in pairs, T(8,128)(2,1), and fewer rows have tiles of 4, 2 and 1 rows).
The compiler chooses layouts with little padding, for arguments too: here the minor dim is the one
that needs the least. What a kernel reads or writes is an exception: its last dim is the minor one.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.communication import dtype_text
from jaxspeed.hardware.known_chips import Chip
from jaxspeed.jaxpr.primitives import JOINS, KERNELS, PRODUCTS, REDUCTIONS, RESHAPES, SLICES
from jaxspeed.planner.trace.partitioning import Tie, shards_per_dim, ties_of
from jaxspeed.planner.trace.trace_ir import Scope, Value, all_ops, nearest_first

COLUMNS, ROWS = 128, 8


@dataclass
class Sizes:
    """Bytes of values per device."""

    mesh: Mapping[str, int]
    tiled: bool
    narrow: frozenset[Value] = frozenset()  # fp32 that is stored in 16 bits
    library: bool = False  # matmuls are library kernels, into which nothing is fused
    minor: Mapping[Value, int] = field(default_factory=dict)  # their minor dim, where it is known
    chip: Chip | None = None

    def of(self, value: Value) -> int:
        dtype = self.dtype(value)
        shape, tiled = local_shape(value, self.mesh), self.tiled and not value.host
        return nbytes(shape, dtype, tiled, self.minor.get(value))

    def dtype(self, value: Value) -> Any:
        """The dtype in which an array is stored."""
        return jnp.bfloat16 if value in self.narrow else value.dtype

    def plain(self, value: Value) -> int:
        """Bytes without tiles, as in a message."""
        return nbytes(local_shape(value, self.mesh), value.dtype, False)


def kernel_layouts(scope: Scope) -> dict[Value, int]:
    """The minor dim of each array that a kernel reads or writes, and of what has its layout.

    XLA:TPU propagates a layout through all but matmuls, reductions and reshapes, also to what a
    loop stacks: queries with a head dim of 64 are saved with 128 columns. Of the layouts that reach
    an array, it has the nearest kernel's.
    """
    kernels = (op for op in all_ops(scope) if op.name in KERNELS)
    start = [(v, len(v.shape) - 1) for op in kernels for v in (*op.values, *op.outs) if v.shape]
    layouts: dict[Value, int] = {}
    for value, dim in nearest_first(start, _layout_ties(scope)):
        layouts.setdefault(value, dim)
    return layouts


def _layout_ties(scope: Scope) -> Iterator[tuple[tuple[Value, int], tuple[Value, int]]]:
    for op in all_ops(scope):
        if op.name in PRODUCTS or op.name in REDUCTIONS:
            continue
        ties: Iterable[Tie] = ties_of(op)
        if op.name in SLICES or op.name in JOINS:
            ranks = ((v, out, len(v.shape)) for v in op.values for out in op.outs)
            ties = ((v, d, out, d) for v, out, n in ranks if n == len(out.shape) for d in range(n))
        for v, d, out, e in ties:
            if op.name not in RESHAPES or v.shape[d] == out.shape[e]:
                yield (v, d), (out, e)
                yield (out, e), (v, d)


def local_shape(value: Value, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's shard."""
    pairs = zip(value.shape, shards_per_dim(value, mesh), strict=True)
    return tuple(-(-n // shards) for n, shards in pairs)


def array_text(value: Value, mesh: Mapping[str, int]) -> str:
    """`bf16[4096,14336]`: one device's shard."""
    return f"{dtype_text(value.dtype)}[{','.join(map(str, local_shape(value, mesh)))}]"


@cache
def nbytes(shape: tuple[int, ...], dtype: Any, tiled: bool, minor: int | None = None) -> int:
    """Bytes of an array; `tiled` where device memory stores tiles, `minor` dim as given."""
    width = _width(dtype)
    if not tiled or not shape:
        return math.prod(shape) * width
    dims = range(len(shape)) if minor is None else (minor,)
    return min(_in_tiles(shape, last) for last in dims) * width


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
