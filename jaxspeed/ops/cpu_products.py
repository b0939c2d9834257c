"""The lowering of a layer's gradients for CPUs: products of two matrices, without a transpose.

XLA:CPU has products of matrices only. Where a product sums over several dims, it copies operands so
that these are one dim, and has not seen that they often are one in memory already:

- The gradient of a kernel sums over all tokens, the first dims of [batch, seq, out] and [batch,
  seq, in]. It would copy one operand to [out, batch seq], fuse into that copy what computes the
  operand (the sum of the gradients of all later layers, anew for each kernel), and get a product in
  a slower layout.
- The gradient of an input sums over all outputs, the last dims of [batch, seq, heads, head_dim] and
  of the kernel [in, heads, head_dim]. It would transpose the kernel.

With the summed dims merged, which moves no data, nothing is copied. The exception is the gradient
of a head: there the narrow operand is transposed, which costs little next to the product.

With jax 0.12.0.1 a step of `configs/tiny.yaml` takes 0.86 times as much CPU time, one of a GPT-2 of
two layers 0.91 times (docs/notes/cpu-products.md has how it was measured).

What is traced does not change, and neither does any other platform's program.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir

from jaxspeed.axes import sample_axes

# How many times as wide the wide operand is where the narrow one is transposed.
WIDE = 8


@functools.cache
def merge_summed_dims() -> None:
    """Lower products for CPUs so in this process, from now on."""
    stock = mlir._platform_specific_lowerings["cpu"][lax.dot_general_p].rule

    def lower(ctx: Any, x: Any, y: Any, *, dimension_numbers: Any, **params: Any) -> Any:
        merged = None
        if _only_samples_are_sharded():
            merged = _merged(dimension_numbers, [aval.ndim for aval in ctx.avals_in])
        if merged is None:
            return stock(ctx, x, y, dimension_numbers=dimension_numbers, **params)
        merged = functools.partial(merged, **params)
        return mlir.lower_fun(merged, multiple_results=False)(ctx, x, y)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


def _merged(dimension_numbers: Any, ndims: list[int]) -> Any:
    """The product with its summed dims merged, if several are: the first or the last, in order."""
    (of_x, of_y), batch = dimension_numbers
    count = len(of_x)
    if count < 2 or batch != ((), ()):
        return None
    if of_x == of_y == tuple(range(count)):
        return functools.partial(_over_first, count=count)
    if all(of == tuple(range(n - count, n)) for of, n in zip((of_x, of_y), ndims, strict=True)):
        return functools.partial(_over_last, count=count)
    return None


def _over_first(x: jax.Array, y: jax.Array, *, count: int, **params: Any) -> jax.Array:
    """The product summed over the first `count` dims."""
    shape = (*x.shape[count:], *y.shape[count:])
    rows = math.prod(x.shape[:count])
    a, b = x.reshape(rows, -1), y.reshape(rows, -1)
    swapped = a.shape[1] > b.shape[1]
    if swapped:
        a, b = b, a
    dims = (0,), (0,)
    if b.shape[1] >= WIDE * a.shape[1]:
        a, dims = lax.optimization_barrier(a.T), ((1,), (0,))
    # The barrier keeps the operands' order, against XLA's dot(a, b)^T = dot(b, a).
    product = lax.optimization_barrier(lax.dot_general(a, b, (dims, ((), ())), **params))
    return (product.T if swapped else product).reshape(shape)


def _over_last(x: jax.Array, y: jax.Array, *, count: int, **params: Any) -> jax.Array:
    """The product summed over the last `count` dims."""
    a, b = (z.reshape(*z.shape[:-count], -1) for z in (x, y))
    return lax.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 1,)), ((), ())), **params)


def _only_samples_are_sharded() -> bool:
    """Whether the context mesh shards nothing but a batch.

    Summed dims that are sharded cannot be merged without communication. Without a context mesh, as
    in programs that are not of this package, it is unknown what is sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sharding = {axis for axis, size in mesh.shape.items() if size > 1}
    return not mesh.empty and sharding.issubset(sample_axes())
