"""Rules of operations for `sample_independence`: their dims, degrees, and what is independent.

Dim relations are those of `dim_relations`, for what is element-wise by name, and for operations on
the last dims of each operand.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jaxspeed.errors import LIBRARIES
from jaxspeed.jaxpr.dim_relations import DimRelations, relations, reshape_groups, same_place
from jaxspeed.jaxpr.primitives import (
    ADDITIONS,
    ADDS_INTO,
    ARG_REDUCTIONS,
    COMPARISONS,
    ELEMENTWISE,
    EXTREMA,
    HOMOGENEOUS,
    IN_PLACE,
    JOINS,
    LINEAR,
    MORE_ELEMENTWISE,
    MULTIPLICATIONS,
    OF_MATRICES,
    RESHAPES,
    SAME,
    SCATTERS,
    SLICES,
    SUMS,
)
from jaxspeed.jaxpr.sample_values import FREE, NONE, SUM, SampleValue, Values, either, mixed, union
from jaxspeed.jaxpr.traverse import shape_of

_ELEMENTWISE = ELEMENTWISE | MORE_ELEMENTWISE | SAME
# What numbers of a lookup or an update refer to: dims of one row, those of the columns of indices,
# and the indices' own dims of a batch.
_GATHERS = ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
_SCATTERS = (
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "scatter_indices_batching_dims",
)
INDEXED = {"gather": _GATHERS, **dict.fromkeys(SCATTERS, _SCATTERS)}
# The first operand that says where a slice begins.
STARTS = {"dynamic_slice": 1, "dynamic_update_slice": 2}
# Parameters that are sizes, which may be those of the samples.
SIZES = {"shape", "new_sizes", "sizes", "limit_indices", "slice_sizes", "length"}


def place(eqn: JaxprEqn) -> str:
    """The line of the user's that made an equation, if it is known."""
    lines = source_info_util.summarize(eqn.source_info, num_frames=1000).splitlines()
    user_lines = [line for line in lines if ":" in line and not line.startswith(LIBRARIES)]
    if not user_lines:
        return ""
    file, line, *_ = user_lines[-1].rpartition("/")[2].split(":")  # innermost last
    return f" ({file}, line {line.partition(' ')[0]})"


def elements(x: Any) -> np.ndarray | None:
    """Those of a constant; None of keys, tracers, and arrays that are not here."""
    dtype = getattr(x, "dtype", np.dtype(float))
    is_here = not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
    if not is_here or dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    array = np.asarray(x)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)  # bfloat16


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def relations_of(eqn: JaxprEqn) -> DimRelations | None:
    name = eqn.primitive.name
    in_shapes, out_shapes = (list(map(shape_of, vs)) for vs in (eqn.invars, eqn.outvars))
    is_elementwise = name in _ELEMENTWISE
    if is_elementwise and {len(x) for x in (*in_shapes, *out_shapes)} <= {0, len(out_shapes[0])}:
        return same_place(in_shapes, out_shapes)
    if name in IN_PLACE:
        return same_place(in_shapes, out_shapes)
    if name in OF_MATRICES or name == "fft":
        lead = len(in_shapes[0]) - (2 if name in OF_MATRICES else len(eqn.params["fft_lengths"]))

        def of(shape: Sequence[int]) -> tuple[int | None, ...]:
            return (*range(lead), *[None] * (len(shape) - lead))

        return DimRelations(tuple(map(of, in_shapes)), tuple(map(of, out_shapes)))
    return relations(name, eqn.params, in_shapes, out_shapes)


def numbered(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dims of the operand to which columns of indices refer; none of other operations."""
    _, refers, _ = INDEXED.get(eqn.primitive.name, (None, None, None))
    return getattr(eqn.params["dimension_numbers"], refers) if refers else ()


def writes_along(eqn: JaxprEqn, eqn_relations: DimRelations, dims: Iterable[int]) -> bool:
    """Whether an operation writes at indices along one of these dims of its operand.

    Along the others its updates have the operand's own elements.
    """
    name = eqn.primitive.name
    if name != "dynamic_update_slice" and name not in SCATTERS:
        return False
    updates = eqn_relations.operands[1 if name == "dynamic_update_slice" else 2]
    return any(d in numbered(eqn) or eqn_relations.operands[0][d] not in updates for d in dims)


def is_alike(eqn: JaxprEqn, twin: JaxprEqn, counts: tuple[int, int]) -> bool:
    """Whether an equation has the same parameters for both numbers of samples, but for sizes.

    A size may grow with the samples. A place may not: `x[len(x) // 2]` starts somewhere else.
    """
    for key, here in eqn.params.items():
        there = twin.params.get(key)
        if here is there or not (is_plain(here) and is_plain(there)) or here == there:
            continue
        if here != here and there != there:  # NaN
            continue
        if key not in SIZES or not is_sized(here, there, counts):
            return False
    return True


def is_sized(here: Any, there: Any, counts: tuple[int, int]) -> bool:
    """Whether sizes are the same for both numbers of samples, or grow like them."""
    if isinstance(here, tuple) and isinstance(there, tuple) and len(here) == len(there):
        return all(is_sized(a, b, counts) for a, b in zip(here, there, strict=True))
    is_int = isinstance(here, int) and isinstance(there, int)
    return bool(here == there or (is_int and here * counts[1] == there * counts[0]))


def is_plain(x: Any) -> bool:
    """Whether a parameter is a number, a name, or such a thing."""
    if isinstance(x, tuple):
        return all(map(is_plain, x))
    return x is None or isinstance(x, (bool, int, float, complex, str, np.dtype, np.generic, Enum))


def degree_of(
    eqn: JaxprEqn, twin: JaxprEqn, operands: Values, counts: tuple[int, int]
) -> int | None:
    """The results' power of the number of samples; None if it is no power."""
    name, params, degree = eqn.primitive.name, eqn.params, 0
    pairs = [(shape_of(v), shape_of(w)) for v, w in zip(eqn.invars, twin.invars, strict=True)]
    grown = [(i, d) for i, (a, b) in enumerate(pairs) for d, n in enumerate(a) if n != b[d]]
    is_elementwise = name in _ELEMENTWISE
    if grown and not is_elementwise and all(x.kind is FREE for x in operands):
        eqn_relations, summed = relations_of(eqn), set()
        if eqn_relations is None:
            return None
        result_factors = {factor for factors in eqn_relations.results for factor in factors}
        for i, d in grown:
            factor = eqn_relations.operands[i][d]
            # A reshape's merged dims may be those of a result.
            if name == "reshape" or (factor is not None and factor in result_factors):
                continue
            if d in operands[i].varies | operands[i].drawn or name not in SUMS | EXTREMA | SLICES:
                return None  # some elements of as many as there are samples, or their sum
            summed |= {factor} if name in SUMS else set()
        degree = len(summed)  # sums over as many equal elements as there are samples
    indices = operands[1:2] if name in INDEXED else ()
    indices = operands[STARTS[name] :] if name in STARTS else indices
    if any(x.degree and not x.zero for x in indices):
        return None
    operands = [x for x in operands if not any(x is y for y in indices)]
    degrees = [x.degree for x in operands if not x.zero]
    if not any(degrees):
        return degree
    if name in MULTIPLICATIONS:
        return degree + sum(degrees)
    if name == "scatter-mul":  # some elements are multiplied, and the others are not
        return None if operands[1].degree else operands[0].degree
    if name == "div":
        return operands[0].degree - operands[1].degree
    if name in ("square", "integer_pow"):
        return degrees[0] * params.get("y", 2)
    if name == "convert_element_type" and not jnp.issubdtype(params["new_dtype"], jnp.inexact):
        return None
    if name == "select_n":
        degrees = [x.degree for x in operands[1:] if not x.zero]
    if len({*degrees}) > 1 or name not in HOMOGENEOUS | {"reduce_sum"}:
        return None
    return 0 if name in COMPARISONS or name == "sign" else degree + degrees[0]


def is_linear(name: str, operands: Values) -> bool:
    """Whether an operation is linear in the sums among its operands."""
    is_sum = [x.kind is SUM for x in operands]
    is_sum_or_zero = [x.kind is SUM or x.zero for x in operands]
    if name in ADDITIONS or name in ("concatenate", "stack", "pad"):
        return all(is_sum_or_zero)
    if name == "dynamic_update_slice":
        return all(is_sum_or_zero[:2]) and not any(is_sum[2:])
    if name == "select_n":
        return not is_sum[0] and all(is_sum_or_zero[1:])
    if name == ADDS_INTO:
        return is_sum_or_zero[0] and is_sum_or_zero[2] and not is_sum[1]
    if name in MULTIPLICATIONS:
        return sum(is_sum) == 1
    if name in ("div", "gather", "dynamic_slice"):
        return is_sum[0] and not any(is_sum[1:])
    return name in LINEAR


# -- values that are independent of the batch ------------------------------------------------------


def free_results(eqn: JaxprEqn, operands: Values, degree: int) -> Values:
    name = eqn.primitive.name
    if name == "iota":
        dim = eqn.params["dimension"]
        return [SampleValue(FREE, varies=frozenset({dim}), index=dim)]
    if name == "lt" and operands[0].index is not None and operands[1].zero:
        return [SampleValue(FREE, zero=True)]  # an index is not negative
    if name in ADDITIONS | JOINS | {"stack"}:
        zero = all(x.zero for x in operands)
    elif name == "mul":
        zero = any(x.zero for x in operands)
    else:
        is_kept = name in SAME | RESHAPES | {"broadcast_in_dim", "transpose", "neg", "reduce_sum"}
        zero = is_kept and operands[0].zero
    eqn_relations = relations_of(eqn)
    results = []
    for number, v in enumerate(eqn.outvars):
        if eqn_relations is None:
            every = frozenset(range(len(shape_of(v))))
            draws_alone = any(x.drawn for x in operands) and not any(x.varies for x in operands)
            varies, drawn, index = (NONE, every, None) if draws_alone else (every, NONE, None)
        else:
            varies = _along(eqn, eqn_relations, [x.varies for x in operands], number)
            drawn = _along(eqn, eqn_relations, [x.drawn for x in operands], number) - varies
            index = _index(name, eqn_relations, operands[0])
        root = operands[0].root if name in SAME else None
        results.append(SampleValue(FREE, None, degree, varies, drawn, False, zero, index, (), root))
    return results


def _along(
    eqn: JaxprEqn, eqn_relations: DimRelations, operand_dims: Sequence[frozenset[int]], number: int
) -> frozenset[int]:
    """The dims along which a result varies, where the operands vary along these."""
    name, factors = eqn.primitive.name, eqn_relations.results[number]
    if name == "reshape":  # each dim varies with those of which it is made
        groups = reshape_groups(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))
        return frozenset(d for olds, news in groups if operand_dims[0] & {*olds} for d in news)
    every = frozenset(range(len(factors)))
    # An element that is broadcast is one: its dim has no factor of a result's.
    broadcast = name in ELEMENTWISE | MORE_ELEMENTWISE
    varying = {
        f
        for dims, of_dims, v in zip(operand_dims, eqn_relations.operands, eqn.invars, strict=True)
        for dim, f in enumerate(of_dims)
        if dim in dims and not (broadcast and f is None and shape_of(v)[dim] == 1)
    }
    result_factors = {f for of_dims in eqn_relations.results for f in of_dims}
    summed = name in SUMS | EXTREMA | SLICES | ARG_REDUCTIONS | {"squeeze"}
    if name in SCATTERS or name == "dynamic_update_slice":
        # Alike along the dims that an update covers, as x.at[:, 0].set(1) along the first.
        covered = {*eqn_relations.operands[2 if name in SCATTERS else 1]}
        return frozenset(dim for dim, f in enumerate(factors) if f in varying or f not in covered)
    if name in SLICES | JOINS:  # elements of a dim stay in it
        kept = zip(operand_dims, eqn_relations.operands, strict=True)
        return union(x for x, of in kept if len(of) == len(factors)) | _joined_dim(eqn)
    if varying - result_factors and not summed and name != "gather":
        return every
    # Equal elements stay so, but where they are accumulated along a dim or transformed.
    is_transformed = name in OF_MATRICES or name == "fft"
    unrelated = is_transformed or (varying and name not in ("broadcast_in_dim", "unstack"))
    return _joined_dim(eqn) | {
        dim
        for dim, f in enumerate(factors)
        if f in varying or f in eqn_relations.mixed or (f is None and unrelated)
    }


def _joined_dim(eqn: JaxprEqn) -> frozenset[int]:
    """The dim along which unequal arrays are joined."""
    if eqn.primitive.name == "pad":
        config = eqn.params["padding_config"]
        return frozenset(dim for dim, padding in enumerate(config) if any(padding))
    if eqn.primitive.name in ("stack", "concatenate"):
        return frozenset({_axis_of(eqn)})
    return NONE


def _axis_of(eqn: JaxprEqn) -> int:
    params = eqn.params
    return int(params["dimension"] if "dimension" in params else params["axis"])


def _index(name: str, eqn_relations: DimRelations, x: SampleValue) -> int | None:
    """The dim along which an element of the result is its own index, as in the operand."""
    if x.index is None or name not in {"broadcast_in_dim", "convert_element_type", *RESHAPES}:
        return None
    factor = eqn_relations.operands[0][x.index]
    dims = [dim for dim, f in enumerate(eqn_relations.results[0]) if f == factor and f is not None]
    return dims[0] if len(dims) == 1 else None


def with_columns(eqn: JaxprEqn, operands: Values) -> SampleValue | None:
    """Joined indices, of which some are numbers of samples; None if they are not."""
    shape = shape_of(eqn.outvars[0])
    if _axis_of(eqn) != len(shape) - 1 or shape[-1] != len(operands):
        return None
    if all(x.index is None for x in operands):
        return None
    if all(x.kind is FREE for x in operands):
        (joined,) = free_results(eqn, operands, 0)
        return replace(joined, columns=tuple(operands))
    return replace(mixed(f"indices number samples{place(eqn)}"), columns=tuple(operands))


def in_batches(eqn: JaxprEqn, operands: Values) -> tuple[JaxprEqn, Values]:
    """A lookup or an update by (the sample's number, ...), as x[jnp.arange(n), labels].

    The samples are a batch dim of the operand and of the other indices.
    """
    numbers, of_dims = eqn.params["dimension_numbers"], numbered(eqn)
    dim, columns = operands[0].dim, list(operands[1].columns)
    if dim not in of_dims:
        return eqn, operands
    along = columns.pop(of_dims.index(dim)).index
    single, refers, batching = INDEXED[eqn.primitive.name]
    size = shape_of(eqn.invars[0])[dim]
    if (
        along is None
        or shape_of(eqn.invars[1])[along] != size
        or dim not in getattr(numbers, single)
    ):
        return eqn, operands
    changed = {key: tuple(d for d in getattr(numbers, key) if d != dim) for key in (single, refers)}
    changed["operand_batching_dims"] = (*numbers.operand_batching_dims, dim)
    changed[batching] = (*getattr(numbers, batching), along)
    params = {**eqn.params, "dimension_numbers": numbers._replace(**changed)}
    others = reduce(either, columns, SampleValue(FREE, zero=True))
    return eqn.replace(params=params), [operands[0], others, *operands[2:]]
