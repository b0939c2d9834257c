"""Grouped products by megablox, the TPU kernels that ship with jax, for the rows of one device.

What they leave to their callers is done here:
- The number of rows has to be a multiple of the row tile: rows are padded.
- Rows of no group are uninitialized in the result. Those before the first expert and behind the
  last one are groups of their own, whose products are not computed: then the kernel masks them.
- Tiles and accumulators have to fit into VMEM. With tiles of (512, 1024, 1024), fp32 results of
  `tgmm` do not on a v5p.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

INTERPRET = False  # tests on CPU set it
ROW_TILE = 512
LANES = 128
# Of the 16 MiB that a kernel has by default: two buffers of each block, and an fp32 accumulator.
VMEM = 12 * 2**20


def product(
    values: jax.Array, weight: jax.Array, bounds: jax.Array, transposed: bool, dtype: Any
) -> jax.Array:
    """As `grouped_products.by_blocks`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows = values.shape[0]
    tile = row_tile(rows)
    padded = -(-rows // tile) * tile
    contracted, width = weight.shape[1:][::-1] if transposed else weight.shape[1:]
    products = gmm(
        _padded(values, padded),
        weight,
        _sizes(bounds, padded),
        dtype,
        (tile, *product_tiles(tile, contracted, width, values.dtype, dtype)),
        group_offset=jnp.int32(1),
        transpose_rhs=transposed,
        interpret=INTERPRET,
    )
    return products[:rows]


def gradient(values: jax.Array, cotangent: jax.Array, bounds: jax.Array, dtype: Any) -> jax.Array:
    """As `grouped_products.gradient_by_blocks`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, experts = values.shape[0], bounds.shape[0] - 1
    tile = row_tile(rows)
    padded = -(-rows // tile) * tile
    sizes = (tile, values.shape[1], cotangent.shape[1])
    return tgmm(
        _padded(values, padded).swapaxes(0, 1),
        _padded(cotangent, padded),
        _sizes(bounds, padded),
        dtype,
        (tile, *gradient_tiles(*sizes, values.dtype, dtype)),
        group_offset=jnp.int32(1),
        num_actual_groups=experts,
        interpret=INTERPRET,
    )


def _sizes(bounds: jax.Array, rows: int) -> jax.Array:
    """Of the groups, and of the rows before and behind them."""
    return jnp.diff(bounds, prepend=0, append=rows).astype(jnp.int32)


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return x if x.shape[0] == rows else jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def row_tile(rows: int) -> int:
    """Rows of a tile: as many as there are, for few, in multiples of a packed bf16 register's."""
    return min(ROW_TILE, -(-rows // 16) * 16)


def product_tiles(
    tile: int, contracted: int, width: int, dtype: Any, result: Any
) -> tuple[int, int]:
    """Tiles of the contracted dim and of the result's, as large as VMEM allows."""
    item, out = jnp.dtype(dtype).itemsize, jnp.dtype(result).itemsize

    def needed(of_contracted: int, of_width: int) -> int:
        blocks = item * of_contracted * (tile + of_width) + out * tile * of_width
        return 2 * blocks + 4 * tile * of_width

    return _largest(contracted, width, needed)


def gradient_tiles(tile: int, inner: int, outer: int, dtype: Any, result: Any) -> tuple[int, int]:
    """Tiles of the two dims of the weights: blocks of the rows are widened to fp32 for masking."""
    item, out = jnp.dtype(dtype).itemsize, jnp.dtype(result).itemsize

    def needed(of_inner: int, of_outer: int) -> int:
        blocks = item * tile * (of_inner + of_outer) + out * of_inner * of_outer
        return 2 * blocks + 4 * (of_inner * of_outer + tile * (of_inner + of_outer))

    return _largest(inner, outer, needed)


def _largest(first: int, second: int, needed: Any) -> tuple[int, int]:
    """The tiles of two dims with the most elements that fit, of two candidates the squarer."""

    def candidates(size: int) -> list[int]:
        if size <= LANES:
            return [size]
        return [n for n in (128, 256, 512, 1024) if n < 2 * size]

    fitting = [
        (a * b, min(a, b), a, b)
        for a in candidates(first)
        for b in candidates(second)
        if needed(a, b) <= VMEM
    ]
    return max(fitting)[2:]
