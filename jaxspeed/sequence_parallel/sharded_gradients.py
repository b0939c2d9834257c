"""Gradients of weights that a loop over tiles reads: summed by shard, and over shards after it.

The gradient of a weight is a sum over all samples and tokens, which XLA would reduce over devices
in each iteration. Here a product computes it by shard of samples and tokens, as an array
[shards of samples, shards of tokens, *weight] of which a device has its own part, and the loop adds
these up.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxspeed.axes import SEQ
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.slicing import free_variables, slice_of, sub_jaxpr
from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, Var
from jaxspeed.jaxpr.weight_uses import weight_uses
from jaxspeed.ops.free_axes import free_axes, free_sample_shards

Dims = tuple[int, int]  # that of samples, and that of tokens


@dataclass(frozen=True)
class TokenShards:
    """The shards of samples and of tokens on a mesh, without its manual axes."""

    mesh: Mesh

    @property
    def shape(self) -> tuple[int, int]:
        return free_sample_shards(self.mesh), free_axes(self.mesh).get(SEQ, 1)

    def split(self, x: jax.Array, dims: Dims) -> jax.Array:
        """[shards of samples, shards of tokens, *x of one of them]."""
        samples, tokens = self.shape
        shape: list[int] = []
        places = {}
        for d, n in enumerate(x.shape):
            if d in dims:
                places[d] = len(shape)
                count = samples if d == dims[0] else tokens
                shape += [count, n // count]
            else:
                shape.append(n)
        return jnp.moveaxis(x.reshape(shape), [places[d] for d in dims], [0, 1])

    def zeros(self, like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.shape, *like.shape), like.dtype)

    def reduced(self, x: jax.Array) -> jax.Array:
        """The sum over the shards, in the dtype in which one product would be reduced."""
        flat = x.reshape(-1, *x.shape[2:])  # over both axes at once
        return lax.reduce(flat, jnp.zeros((), x.dtype), lax.add, (0,))


@dataclass(frozen=True)
class ShardedProduct:
    """A product of an array of tokens and a weight, or what is computed from the weight alone."""

    program: Jaxpr  # of (weight, operand)
    weight: Var
    operand: Var
    operand_dims: Dims
    result_dims: Dims

    def apply(
        self, shards: TokenShards, operand: jax.Array, weight: jax.Array, sums: jax.Array
    ) -> jax.Array:
        """The result; the weight's gradient is the cotangent of `sums`, by shard."""

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            (out,) = as_function(self.program)(w, x)
            return out

        @jax.custom_vjp
        def multiply(x: jax.Array, w: jax.Array, sums: jax.Array) -> jax.Array:
            return product(x, w)

        def forward(x: jax.Array, w: jax.Array, sums: jax.Array) -> tuple[jax.Array, Any]:
            return product(x, w), (x, w)

        def backward(saved: Any, ct: jax.Array) -> tuple[Any, ...]:
            x, w = saved
            (to_operand,) = jax.linear_transpose(lambda x: product(x, w), x)(ct)

            def of_shard(x: jax.Array, ct: jax.Array) -> jax.Array:
                (to_weight,) = jax.linear_transpose(lambda w: product(x, w), w)(ct)
                return to_weight

            parts = shards.split(x, self.operand_dims), shards.split(ct, self.result_dims)
            return to_operand, None, jax.vmap(jax.vmap(of_shard))(*parts)

        multiply.defvjp(forward, backward)
        return multiply(operand, weight, sums)


def sharded_products(
    jaxpr: Jaxpr,
    positions: Sequence[int],
    weights: Iterable[Var],
    results: Sequence[Var],
    dims_of: Callable[[Var], Dims | None],
) -> dict[int, ShardedProduct]:
    """The products, by position, of weights which nothing else among these equations reads.

    `dims_of` gives the dims of samples and tokens of an array that has one of each.
    """
    eqns, candidates = [jaxpr.eqns[i] for i in positions], {*weights}
    uses, _ = weight_uses(
        sub_jaxpr(jaxpr, eqns, free_variables(eqns), results), {v: v for v in candidates}
    )
    products = {}
    for use in uses:
        sharded = None
        if use.is_product and len(use.beside) == len(use.weights) == 1:
            (weight,), (operand,) = use.weights, use.beside
            sharded = _product(jaxpr, eqns[: use.position + 1], weight, operand, dims_of)
        if sharded is None:
            candidates -= use.weights
        else:
            products[positions[use.position]] = sharded
    return {i: product for i, product in products.items() if product.weight in candidates}


def _product(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    weight: Var,
    operand: Var,
    dims_of: Callable[[Var], Dims | None],
) -> ShardedProduct | None:
    """The product that the last of these equations is."""
    *_, eqn = eqns
    dims = dims_of(operand), dims_of(eqn.outvars[0])
    program = slice_of(jaxpr, eqns, [weight, operand], eqn.outvars)
    alone = {*free_variables(program.eqns)} == {weight, operand}  # and no constants
    if eqn.primitive.name != "dot_general" or dims[0] is None or dims[1] is None or not alone:
        return None
    return ShardedProduct(program, weight, operand, dims[0], dims[1])
