"""Dim relations: how each primitive relates the dims of its operands and results.

As in an einsum, dims with the same index share a *factor*:

    x @ w                            i k, k j -> i j       k is reduced
    x.T                              i j -> j i
    jnp.cumsum(x, axis=1)            i j -> i j            j is mixed
    x.reshape(5, 12, 64)             i j -> i j _          of [5, 768]: j is the outer dim
    table[ids]                       v e, b -> b e         v is reduced: ids are one-hot rows

(OpShardingRule of XLA's partitioner Shardy has the same form.) Consumers interpret the relations
and operations without a rule: tensor parallelism ends a class of dims there, the planner imitates
the guess of a partitioner.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.jaxpr.primitives import (
    ARG_REDUCTIONS,
    CUMULATIVE,
    GROUPED_PRODUCT,
    PAIRWISE,
    REDUCTIONS,
    SCATTERS,
    SLICES,
    TOKEN_ORDER,
    WINDOW_REDUCTIONS,
)

Factor = int
Factors = tuple[Factor | None, ...]  # one per dim of an array
Shape = Sequence[int]
Rule = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Shape]], "DimRelations"]


@dataclass(frozen=True)
class DimRelations:
    """The factors of an operation's dims; None if no other dim has the same index.

    Dims of one factor have the same size, except the outermost of dims that a reshape merges or
    splits, and the features of a grouped convolution: there, equal contiguous shards of one dim
    correspond to those of the other.

    Attributes:
      operands: factors of each operand.
      results: factors of each result.
      mixed: factors along which an element of the result depends on other indices than its own.
      groups: {factor: number of groups of adjacent indices that must not be separated}.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    mixed: frozenset[Factor] = frozenset()
    groups: Mapping[Factor, int] = field(default_factory=dict)

    def reduced(self, operand: int) -> tuple[int, ...]:
        """The dims of an operand that the operation contracts or reduces."""
        result_factors = {factor for factors in self.results for factor in factors}
        return tuple(
            dim
            for dim, factor in enumerate(self.operands[operand])
            if factor is not None and factor not in result_factors
        )

    def shared(self, operand: int) -> tuple[int, ...]:
        """The dims of an operand that are dims of another operand and of a result."""
        return self._in_results(operand, in_others=True)

    def free(self, operand: int) -> tuple[int, ...]:
        """The dims of an operand that are dims of a result and of no other operand."""
        return self._in_results(operand, in_others=False)

    def _in_results(self, operand: int, *, in_others: bool) -> tuple[int, ...]:
        result_factors = {factor for factors in self.results for factor in factors} - self.mixed
        others = {f for i, factors in enumerate(self.operands) if i != operand for f in factors}
        return tuple(
            dim
            for dim, factor in enumerate(self.operands[operand])
            if factor is not None and factor in result_factors and (factor in others) == in_others
        )


def relations(
    name: str, params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]
) -> DimRelations | None:
    """The dim relations of an operation on arrays of these shapes, or None if it has no rule."""
    rule = RULES.get(name)
    return None if rule is None else rule(params, operands, results)


def same_place(
    operands: Sequence[Shape], results: Sequence[Shape], mixed: Collection[int] = ()
) -> DimRelations:
    """One factor per dim index and size, among arrays of equal rank.

    With no `mixed` dims, the relations of an element-wise operation.
    """
    factors: dict[tuple[int, int, int], Factor] = {}
    for shape in results:
        for dim, size in enumerate(shape):
            factors.setdefault((len(shape), dim, size), len(factors))

    def of(shape: Shape) -> Factors:
        return tuple(factors.get((len(shape), dim, size)) for dim, size in enumerate(shape))

    return DimRelations(
        tuple(map(of, operands)),
        tuple(map(of, results)),
        frozenset(factor for (_, dim, _), factor in factors.items() if dim in mixed),
    )


def pairwise(shapes: Sequence[Shape]) -> DimRelations:
    """Relations of an operation whose result i is operand i."""
    pairs, count = [], 0
    for shape in shapes:
        pairs.append(tuple(range(count, count + len(shape))))
        count += len(shape)
    return DimRelations(tuple(pairs), tuple(pairs))


def reshape_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of dims of `old` and `new` with equal products, without dims of size 1.

    [batch, seq, 768] and [batch, seq, 12, 64] give ([0], [0]), ([1], [1]) and ([2], [2, 3]).
    """
    if 0 in old:
        return
    left = [d for d, n in enumerate(old) if n != 1]
    right = [d for d, n in enumerate(new) if n != 1]
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (x := math.prod(old[d] for d in a)) != (y := math.prod(new[d] for d in b)):
            if x < y:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        yield a, b


# -- element-wise, with exceptions -----------------------------------------------------------------


def _along(*keys: str) -> Rule:
    """The rule of an operation along the dims in one of these parameters."""

    def rule(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
        dims = next(params[key] for key in keys if key in params)
        return same_place(operands, results, dims if isinstance(dims, Sequence) else (dims,))

    return rule


def _window(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    moved = [
        dim
        for dim, at in enumerate(
            zip(
                params["window_dimensions"],
                params["window_strides"],
                params["padding"],
                params["base_dilation"],
                params["window_dilation"],
                strict=True,
            )
        )
        if at != (1, 1, (0, 0), 1, 1)
    ]
    return same_place(operands, results, moved)


def _pad(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """Padding shifts the indices of a dim, even if its size stays."""
    config = params["padding_config"]
    return same_place(operands, results, [d for d, x in enumerate(config) if any(x)])


def _slice(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """Slices and updates relate dims of equal size, no others."""
    return same_place(operands, results)


def _pairwise(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    return pairwise(results)


# -- layout and broadcasts -------------------------------------------------------------------------


def _transpose(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    order = tuple(map(int, params["permutation"]))
    return DimRelations((tuple(range(len(order))),), (order,))


def _squeeze(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    dims = tuple(range(len(operands[0])))
    return DimRelations((dims,), (tuple(d for d in dims if d not in params["dimensions"]),))


def _stack(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    dims = tuple(range(len(operands[0])))
    axis = params["axis"]
    return DimRelations((dims,) * len(operands), ((*dims[:axis], None, *dims[axis:]),))


def _unstack(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    dims = tuple(range(len(operands[0])))
    axis = params["axis"]
    rest = (*dims[:axis], *dims[axis + 1 :])
    return DimRelations(((*dims[:axis], None, *dims[axis + 1 :]),), (rest,) * len(results))


def _broadcast(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    out: list[Factor | None] = [None] * len(results[0])
    for dim, (size, place) in enumerate(zip(operands[0], params["broadcast_dimensions"])):
        if size == results[0][place]:
            out[place] = dim
    factors = tuple(d if d in out else None for d in range(len(operands[0])))
    return DimRelations((factors, *((None,) * len(s) for s in operands[1:])), (tuple(out),))


def _tile(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    return same_place(operands, results, [d for d, n in enumerate(params["reps"]) if n != 1])


def _reshape(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    old: list[Factor | None] = [None] * len(operands[0])
    new: list[Factor | None] = [None] * len(results[0])
    if params.get("dimensions") is None:
        for factor, (olds, news) in enumerate(reshape_groups(operands[0], results[0])):
            old[olds[0]] = new[news[0]] = factor
    return DimRelations((tuple(old),), (tuple(new),))


# -- reductions and products -----------------------------------------------------------------------


def _reduce(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    return _without(params.get("axes", params.get("dimensions")), operands, results)


def _argument(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """An argmax cannot be reduced from the argmax of each shard."""
    reduction = _without(params["axes"], operands, results)
    (factors,) = reduction.operands
    gone = tuple(None if d in params["axes"] else f for d, f in enumerate(factors))
    return DimRelations((gone,), reduction.results)


def _without(
    gone: Sequence[int], operands: Sequence[Shape], results: Sequence[Shape]
) -> DimRelations:
    """A reduction of one or several arrays; scalar operands are initial values."""
    dims = tuple(range(len(operands[0])))
    left = tuple(d for d in dims if d not in gone)
    return DimRelations(tuple(dims if shape else () for shape in operands), (left,) * len(results))


def _dot(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    lhs = tuple(range(len(operands[0])))
    pairs = dict(zip((*rhs_sum, *rhs_batch), (*lhs_sum, *lhs_batch), strict=True))
    rhs = tuple(pairs.get(d, len(lhs) + d) for d in range(len(operands[1])))
    out = (
        *(lhs[d] for d in lhs_batch),
        *(f for d, f in enumerate(lhs) if d not in (*lhs_sum, *lhs_batch)),
        *(f for d, f in enumerate(rhs) if d not in (*rhs_sum, *rhs_batch)),
    )
    return DimRelations((lhs, rhs), (out,))


def _convolution(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """Batch is free, input features are contracted, output features are the kernel's.

    A depthwise kernel has one or more output features per input feature. A group of features must
    be on one device.
    """
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    image: list[Factor | None] = [None] * len(operands[0])
    kernel: list[Factor | None] = [None] * len(operands[1])
    out: list[Factor | None] = [None] * len(results[0])
    samples, inputs, outputs, window = 0, 1, 2, 3
    mixed = []
    for n, (d, e) in enumerate(zip(numbers.lhs_spec[2:], numbers.out_spec[2:]), window):
        if operands[0][d] == results[0][e]:
            image[d] = out[e] = n
            mixed.append(n)
    if params["batch_group_count"] != 1:
        return DimRelations((tuple(image), tuple(kernel)), (tuple(out),), frozenset(mixed))
    image[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = samples
    kernel[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = outputs
    if groups == 1:
        image[numbers.lhs_spec[1]] = kernel[numbers.rhs_spec[1]] = inputs
    else:
        image[numbers.lhs_spec[1]] = outputs
    unsplit = {outputs: groups} if groups > 1 else {}
    return DimRelations((tuple(image), tuple(kernel)), (tuple(out),), frozenset(mixed), unsplit)


def _grouped(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """Rows [parts, shards, rows, dim]: these dims stay, and a row's expert is that of its place.

    The dims of the weights have their own way.
    """
    rows = (0, 1, 2, None)
    weights, bounds = (None,) * len(operands[1]), (1, None)
    return DimRelations((rows, weights, bounds), (rows,), frozenset({2}))


# -- indexing --------------------------------------------------------------------------------------


def _gather(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """A lookup: full dims of the table and the dims of the ids become dims of the result.

    A dim that is looked up one row at a time is contracted, as in the matmul with one-hot rows.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, rank = operands[0], len(results[0])
    batching = numbers.operand_batching_dims
    table: list[Factor | None] = [None] * len(shape)
    for dim in numbers.start_index_map:
        if sizes[dim] == 1:
            table[dim] = rank + dim
    kept = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *batching)]
    for dim, place in zip(kept, numbers.offset_dims, strict=True):
        if sizes[dim] == shape[dim]:
            table[dim] = place
    ids = tuple(d for d in range(rank) if d not in numbers.offset_dims)
    for dim, ids_dim in zip(batching, numbers.start_indices_batching_dims, strict=True):
        table[dim] = ids[ids_dim]
    offsets = (f if f in table else None for f in range(rank))
    out = tuple(f if f in ids else offset for f, offset in enumerate(offsets))
    return DimRelations((tuple(table), (*ids, None)), (out,))


def _scatter(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> DimRelations:
    """The dims of the target, and those of the updates' windows that cover a dim of it in full.

    The other dims of updates and ids are reduced.
    """
    numbers, shape, updates_shape = params["dimension_numbers"], operands[0], operands[2]
    batching = numbers.operand_batching_dims
    target, count = tuple(range(len(shape))), len(shape)
    updates: list[Factor | None] = [None] * len(updates_shape)
    kept = [d for d in target if d not in (*numbers.inserted_window_dims, *batching)]
    for dim, place in zip(kept, numbers.update_window_dims, strict=True):
        if updates_shape[place] == shape[dim]:
            updates[place] = dim
    places = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    pairs = dict(zip(numbers.scatter_indices_batching_dims, batching, strict=True))
    ids = tuple(pairs.get(d, count + d) for d in range(len(places)))
    for factor, place in zip(ids, places, strict=True):
        updates[place] = factor
    return DimRelations((target, (*ids, None), tuple(updates)), (target,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "top_k": _along("axis"),
    TOKEN_ORDER: _along("dim"),
    **dict.fromkeys(WINDOW_REDUCTIONS, _window),
    "pad": _pad,
    **dict.fromkeys(SLICES, _slice),
    **dict.fromkeys(PAIRWISE, _pairwise),
    "transpose": _transpose,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "reshape": _reshape,
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(ARG_REDUCTIONS, _argument),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    GROUPED_PRODUCT: _grouped,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
