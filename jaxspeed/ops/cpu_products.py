"""The lowering of weight gradients for CPUs: one product of two matrices, without a transpose.

The gradient of a kernel sums over all tokens, that is over several dims of both operands, [batch,
seq, out] and [batch, seq, in]. XLA:CPU has products of matrices only: it first copies one operand
to [out, batch seq], fuses into that copy what computes the operand (the sum of the gradients of
all later layers, anew for each kernel), and gets a product in a slower layout. With the summed dims
merged, which moves no data, nothing is copied.

What is traced does not change, and neither does any other platform's program.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir

from jaxspeed.placement.mesh import DATA_AXES


@functools.cache
def merge_summed_dims() -> None:
    """Lower products for CPUs so in this process, from now on."""
    stock = mlir._platform_specific_lowerings["cpu"][lax.dot_general_p].rule

    def lower(ctx: Any, x: Any, y: Any, *, dimension_numbers: Any, **params: Any) -> Any:
        if _sums_leading(dimension_numbers) and _only_samples_are_sharded():
            count = len(dimension_numbers[0][0])
            merged = functools.partial(_merged, count=count, **params)
            return mlir.lower_fun(merged, multiple_results=False)(ctx, x, y)
        return stock(ctx, x, y, dimension_numbers=dimension_numbers, **params)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


def _merged(x: jax.Array, y: jax.Array, *, count: int, **params: Any) -> jax.Array:
    """The product summed over the first `count` dims, of matrices."""
    shape = (*x.shape[count:], *y.shape[count:])
    rows = math.prod(x.shape[:count])
    a, b = x.reshape(rows, -1), y.reshape(rows, -1)
    swapped = a.shape[1] > b.shape[1]
    if swapped:
        a, b = b, a
    # The barrier keeps the operands' order, against XLA's dot(a, b)^T = dot(b, a).
    product = lax.optimization_barrier(lax.dot_general(a, b, (((0,), (0,)), ((), ())), **params))
    return (product.T if swapped else product).reshape(shape)


def _sums_leading(dimension_numbers: Any) -> bool:
    """Whether several dims are summed, the first ones of both operands, in order."""
    (of_x, of_y), batch = dimension_numbers
    leading = tuple(range(len(of_x)))
    return len(leading) > 1 and batch == ((), ()) and of_x == of_y == leading


def _only_samples_are_sharded() -> bool:
    """Whether the context mesh shards nothing but the first of the summed dims, if any.

    Dims that are sharded both cannot be merged without communication. Without a context mesh, as in
    programs that are not of this package, it is unknown what is sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and math.prod(mesh.shape.values()) == math.prod(
        mesh.shape.get(axis, 1) for axis in DATA_AXES
    )
