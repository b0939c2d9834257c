"""Expressions of the elements of arrays: masks and their parts, and arithmetic on them.

An expression says how each element of an array follows from its indices and from the elements of
other arrays at the same indices. Masks become comparable so: a boolean is a combination of bands of
index differences and of conditions on other arrays, and a bias of two values is a `TwoValued`
between them. `traced_expressions` gives those of a traced program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Const:
    """The same value everywhere."""

    value: Any  # a Python bool, int or float


@dataclass(frozen=True)
class Affine:
    """An integer: the sum of index[dim] * factor, and a constant."""

    factors: tuple[tuple[Any, int], ...]
    constant: int

    def plus(self, other: Affine | Const, sign: int = 1) -> Affine:
        added = dict(self.factors)
        for dim, factor in getattr(other, "factors", ()):
            added[dim] = added.get(dim, 0) + sign * factor
        constant = other.constant if isinstance(other, Affine) else other.value
        left = {dim: factor for dim, factor in added.items() if factor}
        return Affine(tuple(sorted(left.items())), self.constant + sign * int(constant))

    def times(self, number: int) -> Affine:
        return Affine(tuple((d, f * number) for d, f in self.factors), self.constant * number)


@dataclass(frozen=True)
class Element:
    """The element of another array of the program; its dims, by the dims of this one."""

    variable: Any
    dims: tuple[Any, ...]  # None: of size 1


@dataclass(frozen=True)
class AtLeastZero:
    """Whether an affine expression is not negative."""

    of: Affine


@dataclass(frozen=True)
class TwoValued:
    """One of two numbers."""

    condition: Expression
    if_true: Any
    if_false: Any


@dataclass(frozen=True)
class Operation:
    """An operation on the elements of expressions: and, or, not, abs, or a comparison."""

    name: str
    operands: tuple[Expression, ...]
    terms: int = 1


Expression = Const | Affine | Element | AtLeastZero | TwoValued | Operation

TRUE, FALSE = Const(True), Const(False)


def terms(e: Expression) -> int:
    if isinstance(e, TwoValued):
        return 1 + terms(e.condition)
    return e.terms if isinstance(e, Operation) else 1


def operation(name: str, *operands: Expression) -> Expression:
    return Operation(name, operands, 1 + sum(map(terms, operands)))


def depends(e: Expression) -> frozenset[Any]:
    """The dims along which an expression may vary."""
    if isinstance(e, Affine):
        return frozenset(dim for dim, _ in e.factors)
    if isinstance(e, Element):
        return frozenset(dim for dim in e.dims if dim is not None)
    if isinstance(e, AtLeastZero):
        return depends(e.of)
    if isinstance(e, TwoValued):
        return depends(e.condition)
    return frozenset().union(*map(depends, e.operands)) if isinstance(e, Operation) else frozenset()


def leaves(e: Expression) -> list[Element]:
    if isinstance(e, Element):
        return [e]
    inner = (
        (e.condition,)
        if isinstance(e, TwoValued)
        else e.operands
        if isinstance(e, Operation)
        else ()
    )
    return [leaf for operand in inner for leaf in leaves(operand)]


def with_leaves(e: Expression, new: Callable[[Any], Any]) -> Expression:
    """The expression of `new` of the arrays that this one reads."""
    if isinstance(e, Element):
        return Element(new(e.variable), e.dims)
    if isinstance(e, TwoValued):
        return TwoValued(with_leaves(e.condition, new), e.if_true, e.if_false)
    if isinstance(e, Operation):
        return Operation(e.name, tuple(with_leaves(x, new) for x in e.operands), e.terms)
    return e


def with_dims(e: Expression, new: Callable[[Any], Any]) -> Expression:
    """The expression for an array whose dims are `new` of those of this one; None: of size 1."""
    if isinstance(e, Affine):
        places = ((new(dim), factor) for dim, factor in e.factors)
        moved = (Affine(((dim, factor),), 0) for dim, factor in places if dim is not None)
        out = Affine((), e.constant)
        for term in moved:
            out = out.plus(term)
        return out
    if isinstance(e, Element):
        return Element(e.variable, tuple(None if d is None else new(d) for d in e.dims))
    if isinstance(e, AtLeastZero):
        inner = with_dims(e.of, new)
        assert isinstance(inner, Affine)
        return at_least_zero(inner)
    if isinstance(e, TwoValued):
        return TwoValued(with_dims(e.condition, new), e.if_true, e.if_false)
    if isinstance(e, Operation):
        return Operation(e.name, tuple(with_dims(x, new) for x in e.operands), e.terms)
    return e


# -- booleans --------------------------------------------------------------------------------------


def at_least_zero(e: Affine) -> Expression:
    return AtLeastZero(e) if e.factors else Const(e.constant >= 0)


def negated(e: Expression) -> Expression:
    if isinstance(e, Const):
        return Const(not e.value)
    if isinstance(e, AtLeastZero):
        return at_least_zero(e.of.times(-1).plus(Const(-1)))
    if isinstance(e, Operation) and e.name == "not":
        return e.operands[0]
    if isinstance(e, Operation) and e.name in ("and", "or"):
        return (either if e.name == "and" else both)(*map(negated, e.operands))
    if isinstance(e, Operation) and e.name in ("eq", "ne"):
        return Operation("ne" if e.name == "eq" else "eq", e.operands, e.terms)
    return operation("not", e)


def both(a: Expression, b: Expression) -> Expression:
    if FALSE in (a, b):
        return FALSE
    if TRUE in (a, b) or a == b:
        return b if a == TRUE else a
    return operation("and", a, b)


def either(a: Expression, b: Expression) -> Expression:
    if TRUE in (a, b):
        return TRUE
    if FALSE in (a, b) or a == b:
        return b if a == FALSE else a
    return operation("or", a, b)


def conjuncts(e: Expression) -> list[Expression]:
    """The conditions that are all true where `e` is."""
    if isinstance(e, Operation) and e.name == "and":
        return [conjunct for operand in e.operands for conjunct in conjuncts(operand)]
    return [] if e == TRUE else [e]


# -- evaluation ------------------------------------------------------------------------------------


def evaluate_expression(
    e: Expression,
    dims: Sequence[Any],
    sizes: Mapping[Any, int],
    value_of: Callable[[Any], Any],
) -> Any:
    """The array of an expression with these dims; those that it does not vary along have size 1."""
    place = {dim: i for i, dim in enumerate(dims)}

    def indices(dim: Any) -> Any:
        shape = [sizes[dim] if i == place[dim] else 1 for i in range(len(dims))]
        return lax.broadcasted_iota(jnp.int32, shape, place[dim])

    def of(e: Expression) -> Any:
        if isinstance(e, Const):
            return e.value
        if isinstance(e, Affine):
            total: Any = e.constant
            for dim, factor in e.factors:
                total = total + factor * indices(dim)
            return total
        if isinstance(e, Element):
            x = value_of(e.variable)
            kept = [d for d, dim in enumerate(e.dims) if dim is not None]
            x = lax.squeeze(x, [d for d in range(x.ndim) if d not in kept])
            names = [dim for dim in e.dims if dim is not None]
            order = sorted(range(len(names)), key=lambda i: place[names[i]])
            x = lax.transpose(x, order)
            here = [place[names[i]] for i in order]
            return lax.expand_dims(x, [i for i in range(len(dims)) if i not in here])
        if isinstance(e, AtLeastZero):
            return of(e.of) >= 0
        if isinstance(e, TwoValued):
            return jnp.where(of(e.condition), e.if_true, e.if_false)
        values = [of(x) for x in e.operands]
        return _EVALUATED[e.name](*values)

    return of(e)


_EVALUATED: Mapping[str, Callable[..., Any]] = {
    "and": jnp.logical_and, "or": jnp.logical_or, "not": jnp.logical_not, "abs": jnp.abs,
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal,
    "gt": jnp.greater, "ge": jnp.greater_equal,
}  # fmt: skip
