"""Dim rules: how each primitive relates the dims of its operands and results.

A rule ties the nodes of its operands and gives those of its results. Where an operation needs a
whole dim, or mixes along it, the rule ties nothing and the dim ends there: the compiler has to
bring the parts together if it is cut. An operation without a rule ties nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Nodes

Rule = Callable[[Any, Sequence[Nodes], DimEquivalence], list[Nodes]]


def results(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """The nodes of an operation's results."""
    rule = RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn, operands, classes)
    if _is_elementwise(eqn):
        return _elementwise(eqn, operands, classes)
    return _untied(eqn, operands, classes)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _untied(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    return [classes.new(_shape(v)) for v in eqn.outvars]


# -- element by element ---------------------------------------------------------------------------


def _is_elementwise(eqn: Any) -> bool:
    """Equal shapes in and out, but for scalars and dims of size 1, by no other name."""
    if eqn.primitive.name in MIXING or not eqn.outvars:
        return False
    shapes = {_shape(v) for v in eqn.outvars}
    if len(shapes) != 1:
        return False
    (out,) = shapes
    return all(
        not _shape(v)
        or (len(_shape(v)) == len(out) and all(n in (1, m) for n, m in zip(_shape(v), out)))
        for v in eqn.invars
    )


def _elementwise(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    outs = [classes.new(_shape(v)) for v in eqn.outvars]
    for nodes in (*operands, *outs[1:]):
        if nodes:
            classes.tie_all(outs[0], nodes)
    return outs


# Equal shapes in and out, and yet no element by element.
MIXING = {"fft", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd", "shard_map"}
MIXING |= {"pallas_call", "all_gather", "all_to_all", "ppermute", "custom_linear_solve"}
MIXING |= {"schur", "hessenberg", "tridiagonal", "tridiagonal_solve", "householder_product"}
MIXING |= {"pure_callback", "io_callback", "ffi_call", "custom_partitioning"}


def _but(
    eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence, dims: Sequence[int]
) -> list[Nodes]:
    """Element by element, but for some dims, along which the operation mixes."""
    outs = [classes.new(_shape(v)) for v in eqn.outvars]
    for nodes, like in zip(operands, outs, strict=False):
        for dim, (a, b) in enumerate(zip(nodes, like, strict=True)):
            if dim not in dims:
                classes.tie(a, b)
                classes.tie(outs[0][dim], b)
    return outs


def _along_axis(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    return _but(eqn, operands, classes, [eqn.params["axis"]])


def _sort(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    return _but(eqn, operands, classes, [eqn.params["dimension"]])


def _reverse(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    return _but(eqn, operands, classes, eqn.params["dimensions"])


# -- moving, slicing, joining ---------------------------------------------------------------------


def _transpose(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    return [tuple(operands[0][dim] for dim in eqn.params["permutation"])]


def _squeeze(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    gone = eqn.params["dimensions"]
    return [tuple(n for dim, n in enumerate(operands[0]) if dim not in gone)]


def _broadcast(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    out = list(classes.new(_shape(eqn.outvars[0])))
    for node, dim in zip(operands[0], eqn.params["broadcast_dimensions"], strict=True):
        if node is not None:
            out[dim] = node
    return [tuple(out)]


def _reshape(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """Dims that are folded or split are tied by their outermost parts: a cut of one into equal
    contiguous parts is a cut of the other, where both divide."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    out = list(classes.new(new))
    if eqn.params.get("dimensions") is None and 0 not in old:
        for olds, news in factors(old, new):
            node = operands[0][olds[0]]
            if len(olds) == len(news) == 1:
                out[news[0]] = node
            else:
                classes.tie(node, out[news[0]])
    return [tuple(out)]


def factors(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The dims of `old` and `new` in the smallest groups of equal product; sizes of 1 are left out.

    [batch, seq, 768] and [batch, seq, 12, 64] give (0, 0), (1, 1) and (2, [2, 3]).
    """
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


def _whole_dims_stay(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """Slices and updates: a dim that keeps its size stays as it is, another one ends."""
    outs = []
    for v in eqn.outvars:
        out = classes.new(_shape(v))
        for nodes, operand in zip(operands, eqn.invars, strict=True):
            if len(nodes) == len(out):
                for a, b, n, m in zip(nodes, out, _shape(operand), _shape(v), strict=True):
                    if n == m:
                        classes.tie(a, b)
        outs.append(out)
    return outs


def _pad(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """Padding moves a dim's indices, even where it keeps the size."""
    config = eqn.params["padding_config"]
    return _but(eqn, operands[:1], classes, [d for d, x in enumerate(config) if any(x)])


def _concatenate(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    out = classes.new(_shape(eqn.outvars[0]))
    for nodes in operands:
        for dim, (a, b) in enumerate(zip(nodes, out, strict=True)):
            if dim != eqn.params["dimension"]:
                classes.tie(a, b)
    return [out]


# -- reducing, multiplying ------------------------------------------------------------------------


def _reduce(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    gone = eqn.params["axes"]
    kept = [tuple(n for dim, n in enumerate(nodes) if dim not in gone) for nodes in operands]
    for other in kept[1:]:
        classes.tie_all(kept[0], other)
    return [kept[0]] * len(eqn.outvars)


def _window(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    window = eqn.params["window_dimensions"]
    return _but(eqn, operands[:1], classes, [d for d, n in enumerate(window) if n != 1])


def _dot(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    lhs, rhs = operands
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    for a, b in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        classes.tie(lhs[a], rhs[b])
    return [
        (
            *(lhs[d] if lhs[d] is not None else rhs[e] for d, e in zip(lhs_batch, rhs_batch)),
            *(n for d, n in enumerate(lhs) if d not in (*lhs_sum, *lhs_batch)),
            *(n for d, n in enumerate(rhs) if d not in (*rhs_sum, *rhs_batch)),
        )
    ]


def _convolution(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """Batch goes through, input features are summed over, output features are the kernel's.

    A depthwise kernel has one output feature (or several) for each of the input's. Of groups of
    features, each device has to have whole ones.
    """
    image, kernel = operands
    numbers = eqn.params["dimension_numbers"]
    out = list(classes.new(_shape(eqn.outvars[0])))
    if eqn.params["batch_group_count"] != 1:
        return [tuple(out)]
    out[numbers.out_spec[0]] = image[numbers.lhs_spec[0]]
    out[numbers.out_spec[1]] = kernel[numbers.rhs_spec[0]]
    groups = eqn.params["feature_group_count"]
    if groups == 1:
        classes.tie(image[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[1]])
    else:
        classes.tie(image[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[0]])
        classes.in_whole(kernel[numbers.rhs_spec[0]], groups)
    return [tuple(out)]


# -- indexing -------------------------------------------------------------------------------------


def _gather(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """A lookup: whole dims of the table go through, the ids' dims become dims of the result."""
    table, ids = operands
    numbers = eqn.params["dimension_numbers"]
    out = list(classes.new(_shape(eqn.outvars[0])))
    sizes, shape = eqn.params["slice_sizes"], _shape(eqn.invars[0])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    for dim, place in zip(kept, numbers.offset_dims, strict=True):
        if sizes[dim] == shape[dim]:
            classes.tie(table[dim], out[place])
    others = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    for node, place in zip(ids[:-1], others, strict=True):
        classes.tie(node, out[place])
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for dim, ids_dim in pairs:
        classes.tie(table[dim], ids[ids_dim])
    return [tuple(out)]


def _scatter(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """The target keeps its dims; whole windows of the updates are dims of the target."""
    target, ids, updates = operands
    numbers, shape = eqn.params["dimension_numbers"], _shape(eqn.invars[0])
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    for dim, place in zip(kept, numbers.update_window_dims, strict=True):
        if _shape(eqn.invars[2])[place] == shape[dim]:
            classes.tie(target[dim], updates[place])
    others = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    for node, place in zip(ids[:-1], others, strict=True):
        classes.tie(node, updates[place])
    return [target]


def _top_k(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    outs = [classes.new(_shape(v)) for v in eqn.outvars]
    for out in outs:
        classes.tie_all(operands[0][:-1], out[:-1])
    return outs


RULES: dict[str, Rule] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "split"), _whole_dims_stay),
    "pad": _pad,
    "concatenate": _concatenate,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _reduce,
    ),
    **dict.fromkeys(("argmax", "argmin", "reduce_xor"), _reduce),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along_axis),
    "sort": _sort,
    "rev": _reverse,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul"), _scatter),
    "top_k": _top_k,
}
