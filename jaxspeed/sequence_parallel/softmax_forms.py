"""Whether the equations of a region are a softmax of scaled, capped and masked scores.

An abstract evaluation of the region: each of its values is the scores in some state, their maximum,
their exponentials, the sum of these, or a result. What is none of them is not a kernel's form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.jaxpr.primitives import CASTS, CUSTOM_DERIVATIVE, IDENTITIES, RESHAPES
from jaxspeed.jaxpr.traverse import JaxprEqn, bodies, is_var
from jaxspeed.sequence_parallel.index_expressions import (
    Const,
    Expression,
    TwoValued,
    negated,
)
from jaxspeed.sequence_parallel.traced_expressions import of_atom

# A score that no other reaches: its exponential is 0 beside any that is seen.
_HIDES = -1e4


@dataclass(frozen=True)
class Hidden:
    """A mask of the scores: those for which `visible` is false are filled, or lowered."""

    visible: Expression
    fill: float
    added: bool


@dataclass(frozen=True)
class Scores:
    scale: float = 1.0
    soft_cap: float | None = None
    in_tanh: bool = False
    masks: tuple[Hidden, ...] = ()


@dataclass(frozen=True)
class Maximum:
    of: Scores


@dataclass(frozen=True)
class Shifted:
    of: Scores


@dataclass(frozen=True)
class Exponentials:
    of: Scores
    shifted: bool


@dataclass(frozen=True)
class Sum:
    of: Exponentials
    inverse: bool = False


@dataclass(frozen=True)
class Result:
    of: Exponentials
    normalized: bool


@dataclass(frozen=True)
class Shares:
    of: Exponentials


State = Scores | Maximum | Shifted | Exponentials | Sum | Result | Shares | None
_KEEPING = CASTS | IDENTITIES | RESHAPES | {"transpose", "broadcast_in_dim"}


def softmax_form(
    eqns: Sequence[JaxprEqn], out: Any, known: Callable[[Any], Expression]
) -> Exponentials | None:
    """The exponentials of a region whose result is a softmax times the values, else None.

    The first equation is the product of queries and keys. `known` gives the expressions of
    operands from outside.
    """
    states: dict[Any, State] = {eqns[0].outvars[0]: Scores()}
    _evaluate(eqns[1:], states, known)
    state = states.get(out)
    return state.of if isinstance(state, Result) and state.normalized else None


def _evaluate(
    eqns: Sequence[JaxprEqn], states: dict[Any, State], known: Callable[[Any], Expression]
) -> None:
    for eqn in eqns:
        if not any(is_var(v) and v in states for v in eqn.invars):
            continue
        if eqn.primitive.name in (*CUSTOM_DERIVATIVE, "jit"):
            (body,) = bodies(eqn)
            operands = dict(zip(body.jaxpr.invars, body.operands, strict=True))
            for v, atom in operands.items():
                if is_var(atom) and atom in states:
                    states[v] = states[atom]
            # What the body computes otherwise is not looked at: its expressions are of no use here.
            inside = {v for inner_eqn in body.jaxpr.eqns for v in inner_eqn.outvars}

            def within(
                atom: Any, operands: Mapping[Any, Any] = operands, inside: set[Any] = inside
            ) -> Expression:
                if is_var(atom) and atom in operands:
                    return known(operands[atom])
                return of_atom(atom) if is_var(atom) and atom in inside else known(atom)

            _evaluate(body.jaxpr.eqns, states, within)
            states.update(
                (v, states.get(inner) if is_var(inner) else None)
                for v, inner in zip(eqn.outvars, body.jaxpr.outvars, strict=True)
            )
            continue
        operand_states = [states.get(v) if is_var(v) else None for v in eqn.invars]
        unknown = any(is_var(v) and v in states and states[v] is None for v in eqn.invars)
        state: State = None
        if not unknown:
            state = _state(eqn, operand_states, known)
        states.update(dict.fromkeys(eqn.outvars, state))


def _state(eqn: JaxprEqn, operands: Sequence[State], known: Callable[[Any], Expression]) -> State:
    name = eqn.primitive.name
    ours = [i for i, state in enumerate(operands) if state is not None]
    (first, *more) = ours
    x = operands[first]
    if name in _KEEPING:
        return x
    if name == "dot_general":
        if len(ours) == 1 and isinstance(x, (Exponentials, Shares)):
            return Result(x.of if isinstance(x, Shares) else x, isinstance(x, Shares))
        return None
    if name in ("reduce_max", "reduce_sum"):
        if name == "reduce_max" and isinstance(x, Scores):
            return Maximum(x)
        return Sum(x) if name == "reduce_sum" and isinstance(x, Exponentials) else None
    if more:
        return _of_two(name, x, operands[more[0]]) if ours == [0, 1] else None
    if len(eqn.invars) == 1:
        return _of_one(eqn, x)
    if name == "select_n":
        return _filled(eqn, first, x, known)
    if len(eqn.invars) != 2:
        return None
    return _with_known(name, x, known(eqn.invars[1 - first]), first)


def _of_one(eqn: JaxprEqn, x: State) -> State:
    name = eqn.primitive.name
    if name == "exp" and isinstance(x, (Scores, Shifted)):
        scores = x.of if isinstance(x, Shifted) else x
        return None if scores.in_tanh else Exponentials(scores, isinstance(x, Shifted))
    if name == "tanh" and isinstance(x, Scores) and not (x.masks or x.in_tanh or x.soft_cap):
        return replace(x, in_tanh=True)
    if name == "neg" and isinstance(x, Scores) and not x.masks:
        return replace(x, scale=-x.scale) if x.soft_cap is None and not x.in_tanh else None
    if name == "integer_pow" and eqn.params["y"] == -1 and isinstance(x, Sum) and not x.inverse:
        return replace(x, inverse=True)
    return None


def _of_two(name: str, a: State, b: State) -> State:
    if name == "sub" and isinstance(a, Scores) and isinstance(b, Maximum) and b.of == a:
        return Shifted(a)
    if name not in ("div", "mul"):
        return None
    if isinstance(a, Sum):
        a, b = b, a
        if name == "div":
            return None
    if isinstance(b, Sum) and b.inverse == (name == "mul"):
        if isinstance(a, Exponentials) and b.of == a:
            return Shares(a)
        if isinstance(a, Result) and not a.normalized and b.of == a.of:
            return replace(a, normalized=True)
    return None


def _with_known(name: str, x: State, other: Expression, first: int) -> State:
    """A value and one from outside the region."""
    if isinstance(other, Const):
        value = float(other.value)
        if name == "max" and isinstance(x, Maximum) and value == -math.inf:
            return x
        if name == "div" and isinstance(x, Sum) and first == 1 and value == 1 and not x.inverse:
            return replace(x, inverse=True)
        if isinstance(x, Scores) and (name == "mul" or (name == "div" and first == 0)):
            return _scaled(x, value if name == "mul" else 1 / value)
        return x if isinstance(x, Scores) and name in ("add", "sub") and value == 0 else None
    if not isinstance(other, TwoValued) or not isinstance(x, Scores) or x.in_tanh:
        return None
    if name == "add" or (name == "sub" and first == 0):
        sign = 1 if name == "add" else -1
        a, b = sign * other.if_true, sign * other.if_false
        if a == 0 and b <= _HIDES:
            return _hidden(x, Hidden(other.condition, b, True))
        if b == 0 and a <= _HIDES:
            return _hidden(x, Hidden(negated(other.condition), a, True))
    return None


def _scaled(x: Scores, by: float) -> State:
    if not math.isfinite(by) or by == 0:
        return None
    if x.in_tanh:
        # soft_cap tanh(s / soft_cap)
        return Scores(x.scale * by, by, False, ()) if by > 0 else None
    if x.soft_cap is not None or (x.masks and by < 0):
        return None
    masks = tuple(replace(m, fill=m.fill * by) for m in x.masks)
    return replace(x, scale=x.scale * by, masks=masks) if _all_hide(masks) else None


def _all_hide(masks: Sequence[Hidden]) -> bool:
    return all(m.fill <= _HIDES for m in masks)


def _hidden(x: Scores, mask: Hidden) -> Scores:
    return replace(x, masks=(*x.masks, mask))


def _filled(eqn: JaxprEqn, first: int, x: State, known: Callable[[Any], Expression]) -> State:
    """`where(condition, scores, fill)`, either way around."""
    if not isinstance(x, Scores) or x.in_tanh or first == 0 or len(eqn.invars) != 3:
        return None
    condition, fill = known(eqn.invars[0]), known(eqn.invars[3 - first])
    selector: Any = eqn.invars[0].aval
    if not isinstance(fill, Const) or fill.value > _HIDES or selector.dtype != bool:
        return None
    visible = condition if first == 2 else negated(condition)
    return _hidden(x, Hidden(visible, float(fill.value), False))
