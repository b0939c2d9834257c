"""An equation that reads an adapted weight, computed without the merged weight.

LoRA (Hu et al. 2021) adds s A B to a weight W. Of the dims of W some are *stacked* (layers,
experts), the product contracts the *inputs*, and the *outputs* remain:

    A  [*stack, *inputs, rank]      B  [*stack, rank, *outputs]      x W + s (dropout(x) A) B

DoRA (Liu et al. 2024) scales each output by its magnitude m over the norm of its merged weights,
a constant to derivatives. The norm is taken without A B, from the norm of W, which a step computes
once (`Objective.with_squares`):

    ||W + s A B||^2 = ||W||^2 + 2 s <W, A B> + s^2 ||A B||^2

So W is read, and no other value has its shape, in either pass. A weight may also be multiplied in
the other direction, as an embedding table is that is the output head too: x B^T A^T.

Dims are labelled: one of the weight has its index in the equation's operand, the others follow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspeed.jaxpr.primitives import GROUPED_PRODUCT
from jaxspeed.jaxpr.traverse import JaxprEqn, shape_of
from jaxspeed.jaxpr.weight_uses import WeightDims

RANK = -1  # the label of the factors' common dim
# Norms are of fp32 on every chip, and in automatic mixed precision too.
_EXACT: Mapping[str, Any] = {
    "precision": lax.Precision.HIGHEST,
    "preferred_element_type": jnp.float32,
}
Labelled = tuple[jax.Array, Sequence[int]]  # with the labels of its dims


class Factors(NamedTuple):
    """The values that adapt a weight."""

    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None  # DoRA: [*stack, *outputs]; experts have none
    squares: jax.Array | None = None  # DoRA: ||W||^2 of each output, `squared_norms`


# -- equations -------------------------------------------------------------------------------------


class _Use(NamedTuple):
    """An equation's view of the weight that it reads."""

    dims: WeightDims  # as this equation reads them
    other: int  # which operand is multiplied with the weight, or indexes it
    beside: tuple[int, ...]  # labels of that operand's dims
    result: tuple[int, ...]  # labels of the result's dims


def dims_of(eqn: JaxprEqn, operand: int) -> WeightDims | None:
    """The dims of a weight that is an operand of an equation; None if it cannot be adapted there.

    They are dims of the operand. A weight that is stacked, or is read by several equations, has
    the dims that its owner decides; `is_adaptable` says whether an equation can do with them.
    """
    use = _use(eqn, operand)
    return use.dims if use and use.dims.inputs and use.dims.outputs else None


def is_adaptable(
    eqn: JaxprEqn, operand: int, dims: WeightDims, has_magnitude: bool = False
) -> bool:
    """Whether `adapted` can compute an equation for a weight with these dims.

    Magnitudes need an equation whose result, or other operand, has all dims of the outputs.
    """
    use = _use(eqn, operand)
    if use is None or _is_forward(eqn, use, dims) is None:
        return False
    labels = {*_labels_of_outputs(dims)}
    return not has_magnitude or labels <= {*use.result} or labels <= {*use.beside}


def _use(eqn: JaxprEqn, operand: int) -> _Use | None:
    of = _USES.get(eqn.primitive.name)
    return of(eqn, operand) if of else None


def _is_forward(eqn: JaxprEqn, use: _Use, dims: WeightDims) -> bool | None:
    """Whether x meets A first; False if it meets B first, None if neither can be.

    All dims that the equation contracts must be of one factor, or stacked.
    """
    contracted, name = {*use.dims.inputs}, eqn.primitive.name
    if name != "dot_general" and contracted & {*dims.stack}:
        return None
    if name in ("ragged_dot_general", GROUPED_PRODUCT) and {*dims.stack} != {*use.dims.stack}:
        return None
    if contracted & {*dims.inputs} and not contracted & {*dims.outputs}:
        return True
    if name in ("conv_general_dilated", GROUPED_PRODUCT) or not contracted & {*dims.outputs}:
        return None
    return None if contracted & {*dims.inputs} else False


def _matmul(eqn: JaxprEqn, operand: int) -> _Use | None:
    contracted, batch = eqn.params["dimension_numbers"]
    return _of_product(eqn, operand, contracted, batch)


def _ragged_matmul(eqn: JaxprEqn, operand: int) -> _Use | None:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if operand != 1 or ragged in (*contracted[0], *batch[0]):
        return None  # an expert's rows have to be rows of the result
    return _of_product(eqn, operand, contracted, batch, numbers.rhs_group_dimensions)


def _grouped_product(eqn: JaxprEqn, operand: int) -> _Use | None:
    """[parts, shards, rows, dim] times [experts, in, out]."""
    if operand != 1 or eqn.params["contracted"] != "in":
        return None
    return _Use(WeightDims((0,), (1,), (2,), "product"), 0, (3, 4, 5, 1), (3, 4, 5, 2))


def _of_product(
    eqn: JaxprEqn,
    operand: int,
    contracted: Sequence[Sequence[int]],
    batch: Sequence[Sequence[int]],
    groups: Sequence[int] = (),
) -> _Use:
    other = 1 - operand
    count, width = (len(shape_of(eqn.invars[i])) for i in (operand, other))
    pairs = {
        theirs: of_weight
        for dims in (contracted, batch)
        for theirs, of_weight in zip(dims[other], dims[operand], strict=True)
    }
    beside = tuple(pairs.get(d, count + d) for d in range(width))
    outputs = [d for d in range(count) if d not in (*contracted[operand], *batch[operand], *groups)]
    rest = [label for label in beside if label >= count]
    first, second = (outputs, rest) if operand == 0 else (rest, outputs)
    dims = WeightDims(
        tuple(sorted((*batch[operand], *groups))),
        tuple(sorted(contracted[operand])),
        tuple(outputs),
        "product",
    )
    return _Use(dims, other, beside, (*batch[operand], *first, *second))


def _convolution(eqn: JaxprEqn, operand: int) -> _Use | None:
    params = eqn.params
    if operand != 1 or params["batch_group_count"] != 1 or params["feature_group_count"] != 1:
        return None
    _, (out, *_), of_result = params["dimension_numbers"]
    count = len(shape_of(eqn.invars[1]))
    dims = WeightDims((), tuple(d for d in range(count) if d != out), (out,), "convolution")
    # Positions along the window of x and of the result are dims of their own.
    beside = tuple(range(count, 2 * count))
    result = tuple(out if d == of_result[1] else 2 * count + d for d in range(count))
    return _Use(dims, 0, beside, result)


def _lookup(eqn: JaxprEqn, operand: int) -> _Use | None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, indices, result_shape = map(shape_of, (*eqn.invars, *eqn.outvars))
    indexed, batch = (
        [*map(int, d)] for d in (numbers.start_index_map, numbers.operand_batching_dims)
    )
    outputs = [d for d in range(len(shape)) if d not in (*indexed, *batch)]
    if (
        operand != 0
        or {*indexed} != {*numbers.collapsed_slice_dims}
        or any(sizes[d] != shape[d] for d in outputs)
    ):
        return None
    beside = [len(shape) + d for d in range(len(indices) - 1)]
    for of_weight, theirs in zip(batch, numbers.start_indices_batching_dims, strict=True):
        beside[theirs] = of_weight
    rows, columns = iter(beside), iter(outputs)
    result = [next(columns if d in numbers.offset_dims else rows) for d in range(len(result_shape))]
    dims = WeightDims(tuple(batch), tuple(sorted(indexed)), tuple(outputs), "lookup")
    return _Use(dims, 1, tuple(beside), tuple(result))


_USES: Mapping[str, Callable[[JaxprEqn, int], _Use | None]] = {
    "dot_general": _matmul,
    "ragged_dot_general": _ragged_matmul,
    GROUPED_PRODUCT: _grouped_product,
    "conv_general_dilated": _convolution,
    "gather": _lookup,
}


# -- factors ---------------------------------------------------------------------------------------


def factor_shapes(
    shape: Sequence[int], dims: WeightDims, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B."""
    stack, inputs, outputs = (
        tuple(shape[d] for d in role) for role in (dims.stack, dims.inputs, dims.outputs)
    )
    return (*stack, *inputs, rank), (*stack, rank, *outputs)


def initialized(
    key: jax.Array,
    shape: Sequence[int],
    dims: WeightDims,
    rank: int | np.ndarray,
    how: bool | Literal["gaussian"],
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """A and B for the start of training, distributed as PEFT's.

    One of them is zero, unless `how` (`init_lora_weights`) is false. Each layer of a stack has a
    key of its own, and so has each of its columns of A and rows of B: a layer's numbers depend
    neither on what it is stacked with nor on what its rank is padded to.

    Args:
      key: of the weight, or one of each of its layers [*stack].
      rank: of all layers, or of each one [*stack]; the factors have the largest one, padded with
        zeros. A layer of rank 0 is not adapted.
    """
    stack = tuple(shape[d] for d in dims.stack)
    inputs, outputs = ([shape[d] for d in role] for role in (dims.inputs, dims.outputs))
    most = int(np.max(rank))
    ranks = jnp.broadcast_to(jnp.asarray(rank), stack).reshape(-1)
    if key.ndim == 0 and stack:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(ranks.size))
    else:
        keys = key.reshape(-1)

    def layer(key: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
        def rows(key: jax.Array, row: Callable[[jax.Array], jax.Array]) -> jax.Array:
            numbers = jnp.arange(most)
            drawn = jax.vmap(lambda i: row(jax.random.fold_in(key, i)))(numbers)
            used = (numbers < rank).reshape(-1, *[1] * (drawn.ndim - 1))
            return jnp.where(used, drawn, 0)

        def uniform(sizes: Sequence[int], fan_in: Any) -> Callable[[jax.Array], jax.Array]:
            """He et al. 2015 with a = sqrt(5), PEFT's and torch's choice."""
            limit = lax.rsqrt(jnp.asarray(fan_in, jnp.float32))
            return lambda key: jax.random.uniform(key, sizes, minval=-limit, maxval=limit)

        def normal(sizes: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
            return lambda key: jax.random.normal(key, sizes)

        of_a, of_b = jax.random.split(key)
        if dims.kind == "lookup":
            a, b = rows(of_a, normal(inputs)), rows(of_b, normal(outputs))
            a = jnp.zeros_like(a) if how else a
        else:
            if how == "gaussian":
                a = rows(of_a, normal(inputs)) / jnp.maximum(rank, 1)
            else:
                a = rows(of_a, uniform(inputs, math.prod(inputs)))
            b = rows(of_b, uniform(outputs, jnp.maximum(rank, 1)))
            b = jnp.zeros_like(b) if how else b
        return jnp.moveaxis(a, 0, -1), b

    factors = jax.vmap(layer)(keys, ranks)
    shapes = factor_shapes(shape, dims, most)
    return tuple(x.reshape(s).astype(dtype) for x, s in zip(factors, shapes, strict=True))  # type: ignore[return-value]


def delta(
    shape: Sequence[int], dims: WeightDims, a: jax.Array, b: jax.Array, scale: Any
) -> jax.Array:
    """s A B, in the weight's shape."""
    b = _scaled(b, dims, scale)
    return _contract(a, _labels_of_a(dims), b, _labels_of_b(dims), range(len(shape)))


def merged(weight: jax.Array, dims: WeightDims, factors: Factors, scale: Any) -> jax.Array:
    """The weight with its adapter, in its own dtype."""
    change = delta(weight.shape, dims, factors.a, factors.b, scale)
    total = weight.astype(jnp.promote_types(weight.dtype, change.dtype)) + change
    if factors.magnitude is not None:
        ratio = _ratio(weight, dims, factors, scale)
        total = total * _along(ratio, _labels_of_outputs(dims), range(weight.ndim))
    return total.astype(weight.dtype)


def squared_norms(weight: jax.Array, dims: WeightDims) -> jax.Array:
    """||W||^2 of each output, in fp32 [*stack, *outputs]."""
    labels, outputs = range(weight.ndim), _labels_of_outputs(dims)
    return _contract(weight, labels, weight, labels, outputs, **_EXACT)


def norms(weight: jax.Array, dims: WeightDims, factors: Factors, scale: Any) -> jax.Array:
    """||W + s A B|| of each output, in fp32 [*stack, *outputs], a constant to derivatives.

    It is also DoRA's first magnitude. Products are of the weight's dtype, as those of the layer,
    and summed in fp32.
    """
    factors = lax.stop_gradient(factors)
    squares = squared_norms(weight, dims) if factors.squares is None else factors.squares
    a, of_a = factors.a.astype(weight.dtype), _labels_of_a(dims)
    b, of_b = _scaled(factors.b, dims, scale).astype(jnp.float32), _labels_of_b(dims)
    # [*stack, rank, *outputs], as B
    cross = _contract(a, of_a, weight, range(weight.ndim), of_b, **_EXACT)
    twin = tuple(label if label != RANK else RANK - 1 for label in of_a)
    gram = _contract(a, of_a, a, twin, (*dims.stack, RANK, RANK - 1), **_EXACT)
    again = tuple(label if label != RANK else RANK - 1 for label in of_b)
    self_term = _contract(gram, (*dims.stack, RANK, RANK - 1), b, again, of_b, **_EXACT)
    total = squares + jnp.sum((2 * cross + self_term) * b, axis=len(dims.stack))
    return lax.stop_gradient(jnp.sqrt(jnp.maximum(total, 0)))


def _ratio(weight: jax.Array, dims: WeightDims, factors: Factors, scale: Any) -> jax.Array:
    """DoRA's factor of each output: its magnitude over its norm, or 1 where all weights are 0."""
    assert factors.magnitude is not None
    norm = norms(weight, dims, factors, scale)
    return jnp.where(norm == 0, 1, factors.magnitude / jnp.where(norm == 0, 1, norm))


def _labels_of_a(dims: WeightDims) -> tuple[int, ...]:
    return (*dims.stack, *dims.inputs, RANK)


def _labels_of_b(dims: WeightDims) -> tuple[int, ...]:
    return (*dims.stack, RANK, *dims.outputs)


def _labels_of_outputs(dims: WeightDims) -> tuple[int, ...]:
    """The labels of arrays with one number for each output: magnitudes, norms."""
    return (*dims.stack, *dims.outputs)


def _scaled(b: jax.Array, dims: WeightDims, scale: Any) -> jax.Array:
    """s B; the scale is one number, or one of each layer [*stack]."""
    scale = jnp.asarray(scale, b.dtype)
    return b * (scale.reshape(*scale.shape, *[1] * (b.ndim - scale.ndim)) if scale.ndim else scale)


# -- the adapted equation --------------------------------------------------------------------------


def adapted(
    eqn: JaxprEqn,
    operands: Sequence[jax.Array],
    operand: int,
    dims: WeightDims,
    factors: Factors,
    scale: Any,
    *,
    dropout: float = 0,
    key: jax.Array | None = None,
) -> jax.Array:
    """The result of an equation for the merged weight, which is not computed.

    Args:
      operands: of the equation; that with the number `operand` is the weight.
      dims: of that operand.
      scale: s, or that of each layer [*stack].
      dropout: the rate, with `key`; there is none for an embedding table.
    """
    use = _use(eqn, operand)
    assert use is not None
    x, weight = operands[use.other], operands[operand]
    dropped = x
    if dims.kind == "lookup":
        dropout = 0
    if dropout:
        assert key is not None
        kept = jax.random.bernoulli(key, 1 - dropout, x.shape)
        dropped = jnp.where(kept, x / (1 - dropout), 0).astype(x.dtype)

    def base(x: jax.Array) -> jax.Array:
        replaced = list(operands)
        replaced[use.other] = x
        with eqn.ctx.manager:
            return eqn.primitive.bind(*replaced, **eqn.params)

    def low_rank(x: jax.Array) -> jax.Array:
        return _low_rank(eqn, use, operands, operand, x, dims, factors, scale)

    if factors.magnitude is None:
        return base(x) + low_rank(dropped)
    ratio = _ratio(weight, dims, factors, scale)
    labels = _labels_of_outputs(dims)

    def scaled(ratio: jax.Array, product: Callable[[Any], Any], x: jax.Array) -> jax.Array:
        """The product with weights that are scaled by output."""
        if {*labels} <= {*use.result}:
            y = product(x)
            return y * _along(ratio, labels, use.result).astype(y.dtype)
        return product(x * _along(ratio, labels, use.beside).astype(x.dtype))

    # As PEFT: the base weight meets the full input, and what DoRA adds to it the dropped one.
    unchanged = base(x) + scaled(ratio - 1, base, dropped) if dropout else scaled(ratio, base, x)
    return unchanged + scaled(ratio, low_rank, dropped)


def _low_rank(
    eqn: JaxprEqn,
    use: _Use,
    operands: Sequence[jax.Array],
    operand: int,
    x: jax.Array,
    dims: WeightDims,
    factors: Factors,
    scale: Any,
) -> jax.Array:
    """s (x A) B, or s (x B^T) A^T."""
    name, params = eqn.primitive.name, eqn.params
    dtype = operands[operand].dtype if name == "gather" else x.dtype
    a = factors.a.astype(dtype), _labels_of_a(dims)
    b = _scaled(factors.b, dims, scale).astype(dtype), _labels_of_b(dims)
    first, second = (a, b) if _is_forward(eqn, use, dims) else (b, a)
    if name == GROUPED_PRODUCT:
        # A has no outputs and B no inputs that a tensor axis could shard.
        for factor, dim in ((first[0], "in"), (second[0], "out")):
            sharded = dim if params["sharded"] == dim else None
            params_of_factor = params | {"sharded": sharded, "preferred_element_type": dtype}
            x = eqn.primitive.bind(x, factor, operands[2], **params_of_factor)
        return x
    if name == "ragged_dot_general":
        y, of_y = _ragged(eqn, use, (x, use.beside), first, operands[2])
        y, of_y = _ragged(eqn, use, (y.astype(dtype), of_y), second, operands[2])
        return _transposed(y, of_y, use.result)

    def multiplied(y: Labelled, factor: Labelled, kept: set[int]) -> Labelled:
        """The product with the factor on the weight's side: it needs no transposition."""
        how = {key: params[key] for key in ("precision", "preferred_element_type") if key in params}
        swapped = name == "dot_general" and operand == 0
        return _contracted(*((factor, y) if swapped else (y, factor)), kept, **how)

    if name == "gather":
        y, of_y = _looked_up(eqn, use, *first, x)
    elif name == "conv_general_dilated":
        y, of_y = _convolved(eqn, use, *first, x)
    else:
        y, of_y = multiplied((x, use.beside), first, {*use.result, *second[1]})
    y, of_y = multiplied((y.astype(dtype), of_y), second, {*use.result})
    return _transposed(y, of_y, use.result)


def _looked_up(
    eqn: JaxprEqn, use: _Use, factor: jax.Array, labels: Sequence[int], indices: jax.Array
) -> Labelled:
    """The rows of a factor, [*indices, *rest]."""
    numbers = eqn.params["dimension_numbers"]
    place = {label: d for d, label in enumerate(labels)}
    indexed = tuple(place[d] for d in numbers.start_index_map)
    batch = tuple(place[d] for d in numbers.operand_batching_dims)
    rest = [d for d in range(factor.ndim) if d not in (*indexed, *batch)]
    count = len(use.beside)
    rows = lax.gather(
        factor,
        indices,
        lax.GatherDimensionNumbers(
            offset_dims=tuple(range(count, count + len(rest))),
            collapsed_slice_dims=tuple(sorted(indexed)),
            start_index_map=indexed,
            operand_batching_dims=batch,
            start_indices_batching_dims=numbers.start_indices_batching_dims,
        ),
        tuple(1 if d in (*indexed, *batch) else size for d, size in enumerate(factor.shape)),
        indices_are_sorted=eqn.params["indices_are_sorted"],
        unique_indices=eqn.params["unique_indices"],
        mode=eqn.params["mode"],
        fill_value=0,  # the weight has the value of rows that do not exist
    )
    return rows, (*use.beside, *(labels[d] for d in rest))


def _convolved(
    eqn: JaxprEqn, use: _Use, a: jax.Array, labels: Sequence[int], x: jax.Array
) -> Labelled:
    """The convolution of x to `rank` features, with the window and strides of the weight's."""
    of_x, (out, *of_inputs), of_result = eqn.params["dimension_numbers"]
    place = {label: d for d, label in enumerate(labels)}
    of_a = (place[RANK], *(place[d] for d in of_inputs))
    numbers = lax.ConvDimensionNumbers(of_x, of_a, of_result)
    y = eqn.primitive.bind(x, a, **{**eqn.params, "dimension_numbers": numbers})
    return y, [RANK if label == out else label for label in use.result]


def _ragged(eqn: JaxprEqn, use: _Use, x: Labelled, factor: Labelled, sizes: jax.Array) -> Labelled:
    """The product of each group of rows with its expert's factor."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups, ragged = numbers.rhs_group_dimensions, numbers.lhs_ragged_dimensions
    of_x, labels = list(x[1]), list(factor[1])
    shared = [label for label in of_x if label in labels]
    batch = [label for label in shared if label in use.dims.stack]
    summed = [label for label in shared if label not in batch]
    y = lax.ragged_dot_general(
        x[0],
        factor[0],
        sizes,
        lax.RaggedDotDimensionNumbers(
            (_places((of_x, labels), summed), _places((of_x, labels), batch)),
            [of_x.index(use.beside[d]) for d in ragged],
            [labels.index(d) for d in groups],
        ),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
        group_offset=eqn.params["group_offset"],
    )
    rest = [label for label in of_x if label not in shared]
    return y, [*batch, *rest, *(d for d in labels if d not in (*shared, *groups))]


# -- arrays with labelled dims ---------------------------------------------------------------------


def _contracted(lhs: Labelled, rhs: Labelled, kept: set[int], **how: Any) -> Labelled:
    """The product summed over the labels that both have and that are not kept, and its labels.

    Those that both have come first, then those of the left, then those of the right operand.
    """
    labels = list(lhs[1]), list(rhs[1])
    shared = [label for label in labels[0] if label in labels[1]]
    batch = [label for label in shared if label in kept]
    summed = [label for label in shared if label not in kept]
    numbers = _places(labels, summed), _places(labels, batch)
    rest = [label for side in labels for label in side if label not in shared]
    return lax.dot_general(lhs[0], rhs[0], numbers, **how), [*batch, *rest]


def _places(
    labels: tuple[list[int], list[int]], wanted: Sequence[int]
) -> tuple[list[int], list[int]]:
    lhs, rhs = ([side.index(label) for label in wanted] for side in labels)
    return lhs, rhs


def _contract(
    lhs: jax.Array,
    of_lhs: Sequence[int],
    rhs: jax.Array,
    of_rhs: Sequence[int],
    result: Sequence[int],
    **how: Any,
) -> jax.Array:
    """The product of two arrays with dims in the order of `result`, summed over all others."""
    return _transposed(*_contracted((lhs, of_lhs), (rhs, of_rhs), {*result}, **how), result)


def _transposed(x: jax.Array, labels: Sequence[int], result: Sequence[int]) -> jax.Array:
    order = [*map(list(labels).index, result)]
    return x if order == [*range(x.ndim)] else lax.transpose(x, order)


def _along(x: jax.Array, labels: Sequence[int], result: Sequence[int]) -> jax.Array:
    """An array that broadcasts against one with the dims `result`."""
    order = [label for label in result if label in labels]
    sizes = iter(_transposed(x, labels, order).shape)
    shape = [next(sizes) if label in labels else 1 for label in result]
    return _transposed(x, labels, order).reshape(shape)
