"""What the arrays of a traced program are as expressions of their indices and of other arrays.

`tril`, `iota_q >= iota_k`, a table in numpy and `1 - mask` times -1e9 become comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.jaxpr.dim_relations import reshape_groups
from jaxspeed.jaxpr.traverse import JaxprEqn, is_var, shape_of
from jaxspeed.sequence_parallel.index_expressions import (
    TRUE,
    Affine,
    AtLeastZero,
    Const,
    Element,
    Expression,
    Operation,
    TwoValued,
    at_least_zero,
    both,
    depends,
    either,
    leaves,
    negated,
    operation,
    terms,
    with_dims,
)

_LARGEST_TABLE = 1 << 27  # elements of a constant that is compared with the formula of a mask
_MOST_TERMS = 48  # of an expression; larger ones are arrays of their own


def _nonzero(e: Expression) -> Expression | None:
    if isinstance(e, Const):
        return Const(bool(e.value))
    if isinstance(e, TwoValued):
        return _chosen(e.condition, bool(e.if_true), bool(e.if_false))
    return None


def _chosen(condition: Expression, if_true: bool, if_false: bool) -> Expression:
    if if_true == if_false:
        return Const(if_true)
    return condition if if_true else negated(condition)


# -- rules by primitive ----------------------------------------------------------------------------

_COMPARE: Mapping[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_FLIPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_ARITHMETIC: Mapping[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "max": np.maximum, "min": np.minimum,
}  # fmt: skip
_UNARY: Mapping[str, Any] = {
    "neg": np.negative, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp, "log": np.log, "square": np.square, "abs": np.abs,
}  # fmt: skip


def expression_of(eqn: JaxprEqn, operands: Sequence[Expression]) -> Expression | None:
    """The expression of an equation's result from those of its operands; None if it has no rule."""
    name = eqn.primitive.name
    out: Any = eqn.outvars[0].aval
    first: Any = eqn.invars[0].aval if eqn.invars else None
    if len(eqn.outvars) != 1 or not hasattr(out, "shape"):
        return None
    if name == "iota":
        dim = eqn.params["dimension"]
        return _exact(Affine(((dim, 1),) if out.shape[dim] != 1 else (), 0), out)
    if name in ("copy", "stop_gradient", "name", "optimization_barrier"):
        return operands[0]
    if name in _LAYOUT:
        return _LAYOUT[name](eqn, operands[0])
    if name == "convert_element_type":
        return _converted(operands[0], first, out)
    expression = None
    if name in _COMPARE:
        expression = _compared(name, operands[0], operands[1])
    elif name == "select_n" and first.dtype != bool:
        return None
    elif name in ("and", "or", "not", "xor", "select_n") or out.dtype == bool:
        expression = _boolean(name, operands, out)
    if expression is None and name in _ARITHMETIC:
        expression = _computed(name, operands[0], operands[1], out)
    if expression is None and name in _UNARY:
        expression = _unary(name, operands[0], out)
    if expression is None and name == "integer_pow":
        y = eqn.params["y"]
        expression = _mapped(lambda x: np.power(x, y), operands[0], out)
    return expression if expression is not None and terms(expression) <= _MOST_TERMS else None


def _exact(e: Affine, out: Any) -> Expression | None:
    """An affine expression, if its dtype represents all its values."""
    if jnp.issubdtype(out.dtype, jnp.integer):
        info = jnp.iinfo(out.dtype)
        least, most = int(info.min), int(info.max)
    else:
        most = 1 << (jnp.finfo(out.dtype).nmant + 1)
        least = -most
    low = high = e.constant
    for dim, factor in e.factors:
        reach = factor * (out.shape[dim] - 1)
        low, high = low + min(reach, 0), high + max(reach, 0)
    return e if least <= low and high <= most else None


def _converted(e: Expression, old: Any, new: Any) -> Expression | None:
    if new.dtype == old.dtype:
        return e
    if new.dtype == bool:
        return _nonzero(e)
    if old.dtype == bool:
        if isinstance(e, Const):
            return Const(_in(int(e.value), new))
        return TwoValued(e, _in(1, new), _in(0, new))
    if isinstance(e, Affine):
        return _exact(e, new)
    return _mapped(lambda x: x, e, new)


def _in(value: Any, out: Any) -> Any:
    """A number as the dtype of a result has it."""
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(out.dtype).item()


def _mapped(function: Callable[[Any], Any], e: Expression, out: Any) -> Expression | None:
    def of(value: Any) -> Any:
        with np.errstate(all="ignore"):
            wide = np.float64 if jnp.issubdtype(out.dtype, jnp.inexact) else np.int64
            dtype = out.dtype if out.dtype in (np.float32, np.float64) else wide
            return _in(function(np.asarray(value, dtype)), out)

    if out.dtype == bool:
        return None
    if isinstance(e, Const):
        return Const(of(e.value))
    if isinstance(e, TwoValued):
        return TwoValued(e.condition, of(e.if_true), of(e.if_false))
    return None


def _unary(name: str, e: Expression, out: Any) -> Expression | None:
    if isinstance(e, Affine):
        if name == "neg":
            return _exact(e.times(-1), out)
        return operation("abs", e) if name == "abs" else None
    return _mapped(_UNARY[name], e, out)


def _computed(name: str, a: Expression, b: Expression, out: Any) -> Expression | None:
    integers = isinstance(a, (Affine, Const)) and isinstance(b, (Affine, Const))
    if integers and isinstance(a, Const) and isinstance(b, Const):
        return _mapped(lambda x: _ARITHMETIC[name](x, np.asarray(b.value, x.dtype)), a, out)
    if integers and name in ("add", "sub"):
        sign = 1 if name == "add" else -1
        first = a if isinstance(a, Affine) else Affine((), int(a.value))  # type: ignore[union-attr]
        values = [x.value for x in (a, b) if isinstance(x, Const)]
        if any(v != int(v) for v in values if np.isfinite(v)) or not np.all(np.isfinite(values)):
            return None
        return _exact(first.plus(b, sign), out)  # type: ignore[arg-type]
    if integers and name == "mul":
        scaled, by = (a, b) if isinstance(a, Affine) else (b, a)
        if isinstance(scaled, Affine) and isinstance(by, Const) and by.value == int(by.value):
            return _exact(scaled.times(int(by.value)), out)
        return None
    function = _ARITHMETIC[name]
    if isinstance(a, TwoValued) and isinstance(b, Const):
        return _mapped(lambda x: function(x, np.asarray(b.value, x.dtype)), a, out)
    if isinstance(a, Const) and isinstance(b, TwoValued):
        return _mapped(lambda x: function(np.asarray(a.value, x.dtype), x), b, out)
    if isinstance(a, TwoValued) and isinstance(b, TwoValued):
        if {a.if_true, b.if_true} != {1} or {a.if_false, b.if_false} != {0}:
            return None
        if name in ("mul", "min"):
            return TwoValued(both(a.condition, b.condition), a.if_true, a.if_false)
        if name == "max":
            return TwoValued(either(a.condition, b.condition), a.if_true, a.if_false)
    return None


def _compared(name: str, a: Expression, b: Expression) -> Expression | None:
    if isinstance(a, Const) and not isinstance(b, Const):
        return _compared(_FLIPPED[name], b, a)
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(bool(_COMPARE[name](a.value, b.value)))
    if isinstance(a, TwoValued) and isinstance(b, Const):
        values = (bool(_COMPARE[name](x, b.value)) for x in (a.if_true, a.if_false))
        return _chosen(a.condition, *values)
    if isinstance(b, Const) and isinstance(b.value, bool) and name in ("eq", "ne"):
        return a if b.value == (name == "eq") else negated(a)
    if isinstance(a, Affine) and isinstance(b, (Affine, Const)):
        if isinstance(b, Const) and b.value != b.value // 1:
            return None
        return _sign(name, a.plus(b, -1))
    if (
        isinstance(a, Operation)
        and a.name == "abs"
        and isinstance(b, Const)
        and name in ("lt", "le")
    ):
        (inner,) = a.operands
        assert isinstance(inner, Affine)
        most = int(b.value) - (name == "lt") if b.value == b.value // 1 else None
        if most is None:
            return None
        up, down = (inner.times(s).plus(Const(most)) for s in (-1, 1))
        return both(at_least_zero(up), at_least_zero(down))
    if isinstance(a, Operation) and a.name == "abs" and name in ("gt", "ge"):
        inside = _compared("le" if name == "gt" else "lt", a, b)
        return None if inside is None else negated(inside)
    return operation(name, a, b)


def _sign(name: str, difference: Affine) -> Expression:
    """A comparison of a difference with 0."""
    up, down = difference, difference.times(-1)
    if name == "eq":
        return both(at_least_zero(up), at_least_zero(down))
    if name == "ne":
        return negated(_sign("eq", difference))
    strict = Const(-1 if name in ("gt", "lt") else 0)
    return at_least_zero((up if name in ("gt", "ge") else down).plus(strict))


def _boolean(name: str, operands: Sequence[Expression], out: Any) -> Expression | None:
    if name == "select_n":
        if len(operands) != 3:
            return None
        condition, if_false, if_true = operands
        if isinstance(condition, Const):
            return if_true if condition.value else if_false
        if out.dtype == bool:
            return either(both(condition, if_true), both(negated(condition), if_false))
        if isinstance(if_true, Const) and isinstance(if_false, Const):
            return TwoValued(condition, if_true.value, if_false.value)
        return None
    if out.dtype != bool:
        return None
    if name == "not":
        return negated(operands[0])
    if name in ("and", "mul", "min"):
        return both(*operands)
    if name in ("or", "add", "max"):
        return either(*operands)
    return None


# -- layout ----------------------------------------------------------------------------------------


def _broadcast(eqn: JaxprEqn, e: Expression) -> Expression | None:
    old, places = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
    if len(eqn.invars) != 1:
        return None
    new = shape_of(eqn.outvars[0])
    return _moved(e, {d: int(p) if old[d] == new[p] else None for d, p in enumerate(places)})


def _moved(e: Expression, places: Mapping[int, int | None]) -> Expression:
    """Dims at new places; those of size 1, whose index is 0, have None."""
    return with_dims(e, places.__getitem__)


def _transpose(eqn: JaxprEqn, e: Expression) -> Expression:
    return _moved(e, {int(d): i for i, d in enumerate(eqn.params["permutation"])})


def _squeeze(eqn: JaxprEqn, e: Expression) -> Expression:
    gone = {int(d) for d in eqn.params["dimensions"]}
    kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in gone]
    return _moved(e, dict.fromkeys(gone) | {d: i for i, d in enumerate(kept)})


def _reshape(eqn: JaxprEqn, e: Expression) -> Expression | None:
    """Reshapes that add or remove dims of size 1."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params.get("dimensions") is not None:
        return None
    places: dict[int, int | None] = dict.fromkeys(range(len(old)))
    for olds, news in reshape_groups(old, new):
        if len(olds) != 1 or len(news) != 1:
            return e if isinstance(e, Const) else None
        places[olds[0]] = news[0]
    return _moved(e, places)


def _slice(eqn: JaxprEqn, e: Expression) -> Expression | None:
    """Slices of what follows from indices alone."""
    if leaves(e):
        old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        moved = {d for d in range(len(old)) if old[d] != new[d]}
        return None if moved & depends(e) else e
    start = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    shifted = _shifted(e, start, strides)
    sizes = shape_of(eqn.outvars[0])
    places = {d: d if n != 1 else None for d, n in enumerate(sizes)}
    return None if shifted is None else _moved(shifted, places)


def _shifted(e: Expression, start: Sequence[int], strides: Sequence[int]) -> Expression | None:
    if isinstance(e, Affine):
        out = Affine((), e.constant)
        for dim, factor in e.factors:
            out = out.plus(Affine(((dim, factor * strides[dim]),), factor * start[dim]))
        return out
    if isinstance(e, AtLeastZero):
        inner = _shifted(e.of, start, strides)
        return at_least_zero(inner) if isinstance(inner, Affine) else None
    if isinstance(e, TwoValued):
        condition = _shifted(e.condition, start, strides)
        return None if condition is None else TwoValued(condition, e.if_true, e.if_false)
    if isinstance(e, Operation):
        inside = [_shifted(x, start, strides) for x in e.operands]
        return None if None in inside else Operation(e.name, tuple(inside), e.terms)  # type: ignore[arg-type]
    return e


_LAYOUT: Mapping[str, Callable[[JaxprEqn, Expression], Expression | None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "slice": _slice,
}


# -- constants -------------------------------------------------------------------------------------


def of_atom(atom: Any) -> Expression:
    """The expression of a literal, or of an array of which nothing is known."""
    if not is_var(atom):
        return of_value(atom.val) or Const(0)
    shape = getattr(atom.aval, "shape", ())
    return Element(atom, tuple(d if n != 1 else None for d, n in enumerate(shape)))


def known_value(value: Any) -> Expression | None:
    """The expression of a constant, if a formula gives all its elements."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return of_value(value)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) or value.size > _LARGEST_TABLE:
        return None
    if not getattr(value, "is_fully_addressable", True):
        return None
    return of_value(value)


def of_value(value: Any) -> Expression | None:
    if isinstance(value, jax.core.Tracer):
        return None
    x = np.asarray(value)
    if x.size == 0 or x.dtype == object:
        return None
    first = x.reshape(-1)[0]
    if x.size == 1 or np.all(x == first):
        return Const(first.item())
    wide = [d for d, n in enumerate(x.shape) if n != 1]
    if x.dtype == bool:
        return _band(x, wide)
    if np.issubdtype(x.dtype, np.integer):
        table = _affine_table(x, wide)
        if table is not None:
            return table
    low, high = x.min(), x.max()
    if np.all((x == low) | (x == high)) and not np.isnan(low):
        condition = _band(x == high, wide)
        return None if condition is None else TwoValued(condition, high.item(), low.item())
    return None


def _affine_table(x: np.ndarray, wide: Sequence[int]) -> Affine | None:
    origin = x[(0,) * x.ndim]
    table, factors = np.asarray(origin, np.int64), []
    for d in wide:
        step = int(x[tuple(int(i == d) for i in range(x.ndim))]) - int(origin)
        shape = [x.shape[d] if i == d else 1 for i in range(x.ndim)]
        table = table + step * np.arange(x.shape[d]).reshape(shape)
        factors.append((d, step))
    if not np.array_equal(np.broadcast_to(table, x.shape), x):
        return None
    return Affine(tuple((d, f) for d, f in factors if f), int(origin))


def _band(x: np.ndarray, wide: Sequence[int]) -> Expression | None:
    """A table that is true in a band around a diagonal of two of its dims."""
    varying = [d for d in wide if not np.array_equal(x, np.broadcast_to(x.take([0], d), x.shape))]
    if len(varying) != 2:
        return None
    a, b = varying
    at = tuple(slice(None) if d in varying else 0 for d in range(x.ndim))
    table = x[at]
    rows, columns = np.arange(table.shape[0]), table.shape[1]
    count = table.sum(1)
    some = count > 0
    first, last = table.argmax(1), columns - 1 - table[:, ::-1].argmax(1)
    low, high = int((rows - last)[some].min()), int((rows - first)[some].max())
    begin, end = np.maximum(rows - high, 0), np.minimum(rows - low, columns - 1)
    if not (
        np.array_equal(count, np.maximum(end - begin + 1, 0))
        and np.array_equal(first[some], begin[some])
        and np.array_equal(last[some], end[some])
    ):
        return None
    expression: Expression = TRUE
    if low > 1 - columns:
        expression = both(expression, at_least_zero(Affine(((a, 1), (b, -1)), -low)))
    if high < len(rows) - 1:
        expression = both(expression, at_least_zero(Affine(((a, -1), (b, 1)), high)))
    return expression
