"""Grouped products: rows that are sorted by expert, times the experts' stacked weights.

    y[i] = x[i] W[e]   for  bounds[e] <= i < bounds[e + 1],   y[i] = 0 for all other rows

Each is one equation of a traced program, in the global view, with the stacked weights as an
operand: to passes it is a product as `lax.ragged_dot_general` is. The devices' programs are chosen
when it is lowered:

| lowered for | form |
|---|---|
| TPU | megablox' kernels (`jax.experimental.pallas`), `megablox.py` |
| any | plain products of blocks of rows of one expert each |

Rows are [parts, shards, rows, dim]. `shards` are the devices' own rows, sharded over the axes of
the samples and of their positions. Where a tensor axis shards a dim of the weights, there are as
many `parts`: a product that contracts this dim has partial sums as its result, one a part, and
other results have a part of the dim. The gradient of the weights is computed on each device for its
rows, and summed in the global view, so that it can be reduce-scattered.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import EXPERT, SEQ, TENSOR, axis_names, product, sample_axes
from jaxspeed.jaxpr.primitives import GROUPED_GRADIENT, GROUPED_PRODUCT
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.ops.moe import megablox

Dim = Literal["in", "out"]
MAX_BLOCK = 512  # rows


class Layout(NamedTuple):
    """Where the rows of a mixture are: the mesh axes of the context that are not manual."""

    mesh: AbstractMesh | None  # None: one device
    tokens: tuple[str, ...]  # that shard the rows, outermost first; `expert` is the last one
    axes: tuple[tuple[str, int], ...]  # all axes that are not manual

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def parts(self) -> int:
        return self.sizes.get(TENSOR, 1)

    @property
    def shards(self) -> int:
        return product(self.tokens, self.sizes)

    @property
    def expert_shards(self) -> int:
        return self.sizes.get(EXPERT, 1)

    @property
    def seq_shards(self) -> int:
        return self.sizes.get(SEQ, 1)

    @property
    def sequences(self) -> P:
        """Of an array [batch, seq, ...]."""
        return P(tuple(axis for axis in self.tokens if axis != SEQ) or None, SEQ)

    @property
    def rows(self) -> P:
        """Of an array [parts, shards, ...]."""
        return P(TENSOR if self.parts > 1 else None, self.tokens or None)

    def weights(self, sharded: Dim | None) -> P:
        """Of the experts' weights [experts, in, out]."""
        tensor = TENSOR if self.parts > 1 else None
        return P(
            EXPERT if self.expert_shards > 1 else None,
            tensor if sharded == "in" else None,
            tensor if sharded == "out" else None,
        )

    def on_devices(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """`function` of each device's blocks."""
        if self.mesh is None:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.sizes),
            check_vma=False,  # a Pallas call does not declare over which axes its results vary
        )


def layout() -> Layout:
    """The layout in the context of the trace."""
    free = free_axes()
    if math.prod(free.values()) == 1:
        return Layout(None, (), ())
    of_tokens = (*sample_axes(), SEQ)
    tokens = tuple(axis for axis in axis_names() if axis in of_tokens and free.get(axis, 1) > 1)
    return Layout(jax.sharding.get_abstract_mesh(), tokens, tuple(free.items()))


# -- the primitives --------------------------------------------------------------------------------

grouped_product_p = Primitive(GROUPED_PRODUCT)
grouped_gradient_p = Primitive(GROUPED_GRADIENT)


def grouped_product(
    values: jax.Array,
    weight: jax.Array,
    bounds: jax.Array,
    *,
    layout: Layout,
    sharded: Dim | None = None,
    contracted: Dim = "in",
    active: int,
) -> jax.Array:
    """Rows times the weights of their experts, [parts, shards, rows, the weights' other dim].

    Args:
      values: [parts, shards, rows, dim], of the weights' dtype.
      weight: [experts, in, out].
      bounds: [shards, experts of the shard + 1] int32, first rows of the experts; then the end.
      sharded: the dim of the weights over the tensor axis.
      contracted: the dim of the weights that is summed over.
      active: how many rows are expected to be an expert's, of all shards, to count FLOPs.
    """
    return grouped_product_p.bind(
        values,
        weight,
        bounds,
        layout=layout,
        sharded=sharded if layout.parts > 1 else None,
        contracted=contracted,
        active=active,
        preferred_element_type=jnp.result_type(values, weight),
    )


def _local(size: int, dim: Dim, sharded: Dim | None, layout: Layout) -> int:
    return size // layout.parts if dim == sharded else size


def _product_shape(
    values: Any,
    weight: Any,
    bounds: Any,
    *,
    layout: Layout,
    sharded: Dim | None,
    contracted: Dim,
    active: int,
    preferred_element_type: Any,
) -> Any:
    del active
    sizes: dict[Dim, int] = dict(zip(("in", "out"), weight.shape[1:], strict=True))
    other: Dim = "out" if contracted == "in" else "in"
    rows = (layout.parts, layout.shards, values.shape[2])
    expected = (*rows, _local(sizes[contracted], contracted, sharded, layout))
    if values.shape != expected or bounds.shape[0] != layout.shards:
        raise TypeError(
            f"a grouped product with weights {weight.shape}, contracting {contracted!r}, takes "
            f"rows {expected}, not {values.shape}"
        )
    result = (*rows, _local(sizes[other], other, sharded, layout))
    return jax.core.ShapedArray(result, jnp.dtype(preferred_element_type))


def _bilinear_jvp(primitive: Primitive) -> Any:
    """Both primitives are linear in each of their first two operands."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        first, second, bounds = primals
        out = primitive.bind(first, second, bounds, **params)
        terms = []
        if not isinstance(tangents[0], ad.Zero):
            terms.append(primitive.bind(tangents[0], second, bounds, **params))
        if not isinstance(tangents[1], ad.Zero):
            terms.append(primitive.bind(first, tangents[1], bounds, **params))
        return out, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)

    return rule


def _product_transpose(cotangent: Any, values: Any, weight: Any, bounds: Any, **params: Any) -> Any:
    if isinstance(cotangent, ad.Zero):
        return None, None, None
    contracted = params["contracted"]
    other: Dim = "out" if contracted == "in" else "in"
    if ad.is_undefined_primal(values):
        dtype = values.aval.dtype
        new_params = params | {"contracted": other, "preferred_element_type": dtype}
        grad = grouped_product_p.bind(cotangent.astype(weight.dtype), weight, bounds, **new_params)
        return grad, None, None
    layout, sharded = params["layout"], params["sharded"]
    of_in, of_out = (values, cotangent) if contracted == "in" else (cotangent, values)
    partial = grouped_gradient_p.bind(
        of_in,
        of_out.astype(of_in.dtype),
        bounds,
        layout=layout,
        sharded=sharded,
        shape=weight.aval.shape,
        active=params["active"],
        preferred_element_type=weight.aval.dtype,
    )
    return None, jnp.sum(partial, axis=0) if partial.shape[0] > 1 else partial[0], None


def _partials(layout: Layout, sharded: Dim | None) -> tuple[str, ...]:
    """The axes over which gradients of weights are partial sums."""
    axes = tuple(axis for axis in layout.tokens if axis != EXPERT)
    return (TENSOR, *axes) if layout.parts > 1 and sharded is None else axes


def result_spec(name: str, params: Any) -> P:
    """How the result of one of the primitives is sharded."""
    layout, sharded = params["layout"], params["sharded"]
    if name == GROUPED_PRODUCT:
        return layout.rows
    return P(_partials(layout, sharded) or None, *layout.weights(sharded))


def _gradient_shape(
    values: Any,
    cotangent: Any,
    bounds: Any,
    *,
    layout: Layout,
    sharded: Dim | None,
    shape: tuple[int, ...],
    active: int,
    preferred_element_type: Any,
) -> Any:
    del values, cotangent, bounds, active
    partial = product(_partials(layout, sharded), layout.sizes)
    return jax.core.ShapedArray((partial, *shape), jnp.dtype(preferred_element_type))


def _one_by_one(primitive: Primitive) -> Any:
    """A batching rule that runs the elements of a batch in a loop."""

    def rule(args: Any, dims: Any, **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        moved = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(args, dims, strict=True)
        ]
        return lax.map(lambda operands: primitive.bind(*operands, **params), moved), 0

    return rule


# -- one device's programs -------------------------------------------------------------------------


def _product_on_devices(tpu: bool) -> Any:
    def run(
        values: Any,
        weight: Any,
        bounds: Any,
        *,
        layout: Layout,
        sharded: Dim | None,
        contracted: Dim,
        active: int,
        preferred_element_type: Any,
    ) -> Any:
        del active
        multiply = megablox.product if tpu else by_blocks

        def device(values: Any, weight: Any, bounds: Any) -> Any:
            y = multiply(
                values[0, 0], weight, bounds[0], contracted == "out", preferred_element_type
            )
            return y[None, None]

        specs = (layout.rows, layout.weights(sharded), P(layout.tokens or None))
        return layout.on_devices(device, specs, layout.rows)(values, weight, bounds)

    return run


def _gradient_on_devices(tpu: bool) -> Any:
    def run(
        values: Any,
        cotangent: Any,
        bounds: Any,
        *,
        layout: Layout,
        sharded: Dim | None,
        shape: tuple[int, ...],
        active: int,
        preferred_element_type: Any,
    ) -> Any:
        del active, shape
        gradient = megablox.gradient if tpu else gradient_by_blocks

        def device(values: Any, cotangent: Any, bounds: Any) -> Any:
            return gradient(values[0, 0], cotangent[0, 0], bounds[0], preferred_element_type)[None]

        out = result_spec(GROUPED_GRADIENT, {"layout": layout, "sharded": sharded})
        specs = (layout.rows, layout.rows, P(layout.tokens or None))
        return layout.on_devices(device, specs, out)(values, cotangent, bounds)

    return run


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block: a power of two, so that about an eighth of the blocks' rows is padding."""
    balanced = max(rows // (4 * experts), 1)
    return min(1 << (balanced.bit_length() - 1), MAX_BLOCK, rows) if balanced > 8 else min(8, rows)


def by_blocks(
    values: jax.Array, weight: jax.Array, bounds: jax.Array, transposed: bool, dtype: Any
) -> jax.Array:
    """Rows [rows, in] times weights [experts, in, out], or their transposes, [rows, out]."""
    rows, experts = values.shape[0], weight.shape[0]
    block = block_rows(rows, experts)
    width = weight.shape[1 if transposed else 2]
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))

    def expert(out: jax.Array, operands: Any) -> tuple[jax.Array, None]:
        matrix, start, end = operands

        def one(i: jax.Array, out: jax.Array) -> jax.Array:
            first, at = _place(i, start, block, rows)
            block_rows = lax.dynamic_slice_in_dim(values, at, block)
            products = lax.dot_general(block_rows, matrix, numbers, preferred_element_type=dtype)
            place = at + jnp.arange(block)
            here = (place >= first) & (place < end)
            seen = lax.dynamic_slice_in_dim(out, at, block)
            products = jnp.where(here[:, None], products, seen)
            return lax.dynamic_update_slice_in_dim(out, products, at, axis=0)

        return lax.fori_loop(0, -(-(end - start) // block), one, out), None

    out = jnp.zeros((rows, width), dtype)
    return lax.scan(expert, out, (weight, bounds[:-1], bounds[1:]))[0]


def gradient_by_blocks(
    values: jax.Array, cotangent: jax.Array, bounds: jax.Array, dtype: Any
) -> jax.Array:
    """sum_i values[i] cotangent[i]^T over each expert's rows, [experts, in, out]."""
    rows, experts = values.shape[0], bounds.shape[0] - 1
    block = block_rows(rows, experts)
    wide = jnp.promote_types(dtype, jnp.float32)

    def expert(_: None, bounds_of_expert: Any) -> tuple[None, jax.Array]:
        start, end = bounds_of_expert

        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            first, at = _place(i, start, block, rows)
            place = at + jnp.arange(block)
            here = ((place >= first) & (place < end))[:, None]
            lhs, rhs = (
                jnp.where(here, lax.dynamic_slice_in_dim(x, at, block), 0)
                for x in (values, cotangent)
            )
            numbers = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(lhs, rhs, numbers, preferred_element_type=wide)

        total = jnp.zeros((values.shape[1], cotangent.shape[1]), wide)
        return None, lax.fori_loop(0, -(-(end - start) // block), one, total).astype(dtype)

    return lax.scan(expert, None, (bounds[:-1], bounds[1:]))[1]


def _place(i: jax.Array, start: jax.Array, block: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """(the first row of a block, the row from which it is read: the last block ends with them)."""
    first = start + i * block
    return first, jnp.minimum(first, rows - block)


# -- registration ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _compiled(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *args: primitive.bind(*args, **dict(params)))


def _register(primitive: Primitive, shape: Any, on_devices: Any) -> None:
    primitive.def_impl(
        lambda *args, **params: _compiled(primitive, tuple(sorted(params.items())))(*args)
    )
    primitive.def_abstract_eval(shape)
    ad.primitive_jvps[primitive] = _bilinear_jvp(primitive)
    batching.primitive_batchers[primitive] = _one_by_one(primitive)
    for platform, tpu in ((None, False), ("tpu", True)):
        rule = mlir.lower_fun(on_devices(tpu), multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)


_register(grouped_product_p, _product_shape, _product_on_devices)
_register(grouped_gradient_p, _gradient_shape, _gradient_on_devices)
ad.primitive_transposes[grouped_product_p] = _product_transpose
