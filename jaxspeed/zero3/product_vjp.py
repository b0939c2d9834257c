"""Custom VJP of a matmul in a wide unit: it gathers its own weight, a part of it at a time.

A unit whose weights are large against its activations would hold all of them at once, and their
gradients too. Here each matmul gathers its weight in both passes: forward, while the matmul before
it runs; backward, while its weight gradient is computed, which is reduce-scattered while the input
gradient is. A weight that is larger than the matmul's activations is divided, so that one part of
it after the other is gathered.

Whether that pays is decided from bytes in `wide_products`, and nowhere else: the planner reads the
program that results.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import linear_transpose
from jax.lax import optimization_barrier

from jaxspeed.axes import product as product_of_axes
from jaxspeed.axes import sample_axes
from jaxspeed.jaxpr.evaluate import as_function, bindings, run_equation
from jaxspeed.jaxpr.flops import count_all, equation_flops, nbytes
from jaxspeed.jaxpr.primitives import CHECKPOINTS, GROUPED_PRODUCT
from jaxspeed.jaxpr.slicing import free_variables, sub_jaxpr
from jaxspeed.jaxpr.traverse import JaxprEqn, is_marked, is_var
from jaxspeed.jaxpr.weight_uses import weight_uses
from jaxspeed.ops.free_axes import free_sample_shards
from jaxspeed.placement.specs import num_shards, spec_axes
from jaxspeed.zero3.eager_weight_grads import ties_of
from jaxspeed.zero3.exchange import Exchange
from jaxspeed.zero3.sharded_param import ShardedParam, Storage

# Weights of fewer bytes than so many of the unit's inputs count little among its activations.
INPUTS = 2
# A recomputing unit's backward pass gathers each weight twice. A gather moves 2 bytes per
# parameter, and the matmul that hides it takes 2 FLOPs per row and parameter: with fewer rows per
# device, links do not keep up (v5p: 459 TFLOP/s at 540 GB/s, 850 rows).
ROWS = 1024


@dataclass(frozen=True)
class Product:
    """A matmul, or a grouped product, with one stored weight that nothing else reads.

    Attributes:
      jaxpr: of (weight, operand, *indices); with the equations that compute the matmul's operand
        from the weight, such as a transpose.
      indices: other operands, which are integers: a grouped product's rows of each expert.
      numbers: of these equations; the last one is the matmul.
      dims: the dim of the weight that is divided, and that of the result.
    """

    jaxpr: Any
    weight: Any
    operand: Any
    indices: tuple[Any, ...]
    numbers: tuple[int, ...]
    dims: tuple[int, int] | None = None
    parts: int = 1

    @property
    def eqn(self) -> Any:
        return self.jaxpr.eqns[-1]


def wide_products(jaxpr: Any, storage: Storage) -> list[Product]:
    """The matmuls of a unit that gather their own weights, in order; none if that does not pay."""
    movable = {v: s for v, s in storage.items() if s.trainable and not s.on_host}
    if not movable:
        return []
    mesh = next(iter(movable.values())).gathered.mesh
    ranks = free_sample_shards(mesh)
    inputs = [v.aval for v in jaxpr.invars if v not in storage and len(v.aval.shape) > 1]
    real = [nbytes(x) for x in inputs if jnp.issubdtype(x.dtype, jnp.inexact)]
    weights = sum(_gathered_bytes(v.aval, s) for v, s in storage.items())
    if weights < INPUTS * max(real, default=0) // ranks:
        return []

    def rows(product: Product) -> int:
        """Of each parameter that a device gathers; an expert axis shards samples and experts."""
        size = math.prod(product.weight.aval.shape)
        axes = spec_axes(movable[product.weight].entries)
        owners = product_of_axes(axes & {*sample_axes()}, mesh.shape)
        return equation_flops(product.eqn, count_all) * owners // (2 * size * ranks)

    products = [product for product in _products(jaxpr, movable) if rows(product) >= ROWS]
    return [_divided(product, movable[product.weight], ranks) for product in products]


def _gathered_bytes(aval: Any, stored: ShardedParam) -> int:
    sizes = stored.gathered.mesh.shape
    return nbytes(aval) // math.prod(num_shards(entry, sizes) for entry in stored.entries)


def _products(jaxpr: Any, storage: Storage) -> list[Product]:
    uses, derived = weight_uses(jaxpr, {v: v for v in storage})
    products = []
    for weight in storage:
        # In a checkpoint it is gathered again: the further rounds of a mixture, which seldom run.
        reads = [
            use
            for use in uses
            if weight in use.weights
            and (use.position == len(jaxpr.eqns) or not _is_checkpoint(jaxpr.eqns[use.position]))
        ]
        if len(reads) != 1 or not reads[0].is_product or reads[0].weights != {weight}:
            continue
        if is_marked(jaxpr.eqns[reads[0].position]):
            continue  # it may have a derivative of its own
        chain = [position for position, weights in derived.items() if weights == {weight}]
        numbers = (*chain, reads[0].position)
        eqns = [jaxpr.eqns[i] for i in numbers]
        inputs = [weight, *reads[0].beside]
        if {*free_variables(eqns)} == {*inputs}:  # and no constant that others may read too
            program = sub_jaxpr(jaxpr, eqns, inputs, eqns[-1].outvars)
            products.append(Product(program, weight, inputs[1], tuple(inputs[2:]), numbers))
    return sorted(products, key=lambda product: product.numbers[-1])


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in CHECKPOINTS


def _divided(product: Product, stored: ShardedParam, ranks: int) -> Product:
    """The product in as many parts that one is no larger than its larger activation.

    The first dim that is neither contracted nor sharded is divided: parts of the last dim can be
    narrower than a TPU's tile, whose padding the stacked gradients would have too.
    """
    eqn, weight = product.eqn, product.weight
    if len(product.numbers) > 1:
        return product
    if eqn.primitive.name == GROUPED_PRODUCT:
        free, last = [2], 3  # of [experts, in, out], and of the rows
    elif eqn.primitive.name == "dot_general":
        side = [v is weight for v in eqn.invars].index(True)
        contracted, batch = eqn.params["dimension_numbers"]
        free = [d for d in range(weight.aval.ndim) if d not in (*contracted[side], *batch[side])]
        last = len(eqn.outvars[0].aval.shape) - len(free) if side else len(batch[0])
    else:
        return product
    divisible = [d for d in free if d != stored.sharded_dim and stored.entries[d] is None]
    dim = next((d for d in divisible if weight.aval.shape[d] > 1), None)
    if dim is None:
        return product
    limit = max(nbytes(v.aval) for v in (product.operand, *eqn.outvars)) // ranks
    size, parts = _gathered_bytes(weight.aval, stored), 1
    while size > limit * parts and weight.aval.shape[dim] % (2 * parts) == 0:
        parts *= 2
    return replace(product, dims=(dim, last + free.index(dim)), parts=parts)


def with_products(
    jaxpr: Any,
    products: Sequence[Product],
    storage: Storage,
    exchange: Exchange,
    run_checkpoint: Callable[[JaxprEqn, list[Any], Storage], Sequence[Any]],
) -> Callable[..., list[Any]]:
    """A constant-free jaxpr as a function to which the products' weights are passed as stored.

    `run_checkpoint` runs a checkpoint that reads some of these weights.
    """
    owned = {product.weight: storage[product.weight] for product in products}
    inside = {number: product for product in products for number in product.numbers}
    # As in `with_eager_weight_grads`: the gradient of a weight precedes the input gradient of the
    # matmul before it, during which it may still be reduce-scattered.
    ties = ties_of({p.numbers[-1]: (p.operand, p.weight) for p in products}, storage)

    def run(*args: Any) -> list[Any]:
        env = bindings(jaxpr, (), args)
        operands: dict[int, Any] = {}
        before: Any = None  # the operand of the product before
        for number, eqn in enumerate(jaxpr.eqns):
            product = inside.get(number)
            if (
                product is None
                and _is_checkpoint(eqn)
                and not owned.keys().isdisjoint(v for v in eqn.invars if is_var(v))
            ):
                values = [env[v] if is_var(v) else v.val for v in eqn.invars]
                outs = [*run_checkpoint(eqn, values, owned)]
            elif product is None:
                outs = run_equation(jaxpr, eqn, env.__getitem__)
            elif number != product.numbers[-1]:
                continue
            else:
                if number in ties:
                    operands |= ties[number].apply(env)
                operand, weight = operands.get(number, env[product.operand]), product.weight
                arguments = env[weight], operand, operand if before is None else before
                indices = [env[v] for v in product.indices]
                outs = [_run(product, storage[weight], exchange, *arguments, indices)]
                before = operand
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]

    return run


def _run(
    product: Product,
    stored: ShardedParam,
    exchange: Exchange,
    shard: Any,
    operand: Any,
    before: Any,
    indices: list[Any],
) -> Any:
    """The result of a product; its first gather waits for `before`."""
    count, dims = product.parts, product.dims
    fn, part = as_function(product.jaxpr), stored
    if dims is not None and count > 1:
        shape = list(stored.shape)
        shape[dims[0]] //= count
        part = replace(stored, shape=tuple(shape))
        fn = _of_any_size(product)

    def split(x: Any, dim: int) -> list[Any]:
        return list(jax.lax.split(x, [x.shape[dim] // count] * count, dim)) if count > 1 else [x]

    def join(parts: Sequence[Any], dim: int) -> Any:
        return jnp.concatenate(list(parts), dim) if count > 1 else parts[0]

    of_weight, of_result = dims or (0, 0)

    def read(piece: Any, place: Any) -> Any:
        return exchange.gather([part], [piece], place)[0]

    @jax.custom_vjp
    def run(place: Any, shard: Any, operand: Any, before: Any, indices: Any) -> Any:
        return forward(place, shard, operand, before, indices)[0]

    def forward(place: Any, shard: Any, operand: Any, before: Any, indices: Any) -> Any:
        outs: list[Any] = []
        for piece in split(shard, of_weight):
            # While the part before it is multiplied, a part may be gathered.
            piece, _ = optimization_barrier((piece, [before, operand, *outs][: len(outs) + 1][-1]))
            outs += fn(read(piece, place), operand, *indices)
        return join(outs, of_result), (place, shard, operand, indices)

    def backward(saved: Any, cotangent: Any) -> Any:
        place, shard, operand, indices = saved
        cotangent, operand = optimization_barrier((cotangent, operand))
        pieces, cotangents = split(shard, of_weight), split(cotangent, of_result)
        pieces[0], cotangents[0] = optimization_barrier((pieces[0], cotangents[0]))
        weight = read(pieces[0], place)
        grads: list[Any] = []
        for i, (piece, ct) in enumerate(zip(pieces, cotangents, strict=True)):
            if i > 1:
                grads[-2], ct = optimization_barrier((grads[-2], ct))
            like = jax.ShapeDtypeStruct(part.shape, part.dtype)
            (grad,) = linear_transpose(lambda w: fn(w, operand, *indices)[0], like)(ct)
            if count == 1:  # the weight gradient comes first, and the operand is free after it
                grad, cotangents[0] = optimization_barrier((grad, ct))
            grads += exchange.scatter([part], [grad], [piece], place)
        if count > 1:  # with the exception of the last one, whose scatter is hidden
            grads[-2], cotangents = optimization_barrier((grads[-2], cotangents))
        totals: list[Any] = []
        for i, (piece, ct) in enumerate(zip(pieces, cotangents, strict=True)):
            if i:
                piece, _ = optimization_barrier((piece, [ct, *totals][:i][-1]))
                weight = read(piece, place)
                totals[-1], ct = optimization_barrier((totals[-1], ct))
            (moved,) = linear_transpose(lambda x, w=weight: fn(w, x, *indices)[0], operand)(ct)
            if count > 1:
                moved = moved.astype(jnp.promote_types(moved.dtype, jnp.float32))
            totals.append(totals[-1] + moved if totals else moved)
        return None, join(grads, of_weight), totals[-1].astype(operand.dtype), None, None

    run.defvjp(forward, backward)
    return run(list(exchange.place), shard, operand, before, indices)


def _of_any_size(product: Product) -> Callable[..., list[Any]]:
    """The matmul as a function of (part of the weight, operand, *indices)."""
    eqn = product.eqn
    swapped = eqn.invars[0] is not product.weight

    def fn(weight: Any, operand: Any, *indices: Any) -> list[Any]:
        pair = (operand, weight) if swapped else (weight, operand)
        return [eqn.primitive.bind(*pair, *indices, **eqn.params)]

    return fn
