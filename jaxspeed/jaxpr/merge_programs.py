"""Merging of equal jaxprs into one, with inputs for what differs between them.

Equations are compared position by position. A variable that a jaxpr computes itself must be
computed at the same place in the others; what it reads from outside becomes an input of the merged
jaxpr, and so does a literal in which they differ. Inside a jit, the jit is inlined for that; inside
a jax.checkpoint, it becomes an argument of the checkpoint.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspeed.jaxpr.inline_calls import inline_call
from jaxspeed.jaxpr.primitives import CHECKPOINTS, INLINED
from jaxspeed.jaxpr.rewriter import Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import (
    JaxprEqn,
    Var,
    called,
    is_var,
    nested_constants,
    open_jaxpr,
    with_jaxpr,
)

Atoms = tuple[Any, ...]  # a variable or a literal of each jaxpr, at one position


class DifferentProgram(Exception):
    """The jaxpr of this number computes something else than the first."""

    def __init__(self, number: int) -> None:
        self.number = number


def merge_programs(programs: Sequence[Any]) -> tuple[Any, list[Atoms]]:
    """(the merged jaxpr, the atoms of the jaxprs for each of its inputs).

    Raises:
      DifferentProgram: they cannot be merged.
    """
    return _merge(programs, [{} for _ in programs])


def _merge(programs: Sequence[Any], places: list[dict[Any, Any]]) -> tuple[Any, list[Atoms]]:
    """Merge, where variables of equal `places` are the same; new inputs come last."""
    programs = _inline_different_calls([_without_no_op_casts(p) for p in programs])
    first = programs[0]
    _require_equal((len(p.eqns), len(p.outvars)) for p in programs)
    walk = _Merge(places)
    eqns = [walk.equation(i, eqns) for i, eqns in enumerate(zip(*(p.eqns for p in programs)))]
    outs = [walk.atom(atoms) for atoms in zip(*(p.outvars for p in programs))]
    known = [v for v in first.invars if v in places[0]]
    inputs = [variable for _, variable in walk.inputs.values()]
    program = first.replace(constvars=[], invars=[*known, *inputs], outvars=outs, eqns=eqns)
    return program, [atoms for atoms, _ in walk.inputs.values()]


@dataclass
class _Merge:
    """State of a merge: where variables were computed, and the inputs so far."""

    places: list[dict[Any, Any]]  # per jaxpr: variable -> position of its equation
    inputs: dict[Any, tuple[Atoms, Any]] = field(default_factory=dict)  # (atoms, merged variable)

    def equation(self, index: int, eqns: Atoms) -> Any:
        """The merged equation of these."""
        first = eqns[0]
        _require_equal((e.primitive.name, len(e.invars), _shapes(e.outvars)) for e in eqns)
        invars = [self.atom(atoms) for atoms in zip(*(e.invars for e in eqns))]
        params = first.params
        texts = _texts(eqns)
        if first.primitive.name in CHECKPOINTS and len(set(texts)) > 1:
            _require_equal(_text(e, but="jaxpr") for e in eqns)
            body, reads = self._body([open_jaxpr(called(e))[0] for e in eqns])
            invars += [self.atom(atoms) for atoms in reads]
            params = {**params, "jaxpr": with_jaxpr(params["jaxpr"], body)}
        else:
            _require_equal(texts)
        for places, e in zip(self.places, eqns, strict=True):
            places.update((v, (index, i)) for i, v in enumerate(e.outvars))
        return first.replace(invars=invars, params=params)

    def _body(self, bodies: Sequence[Any]) -> tuple[Any, list[Atoms]]:
        return _merge(bodies, [{v: ("in", i) for i, v in enumerate(b.invars)} for b in bodies])

    def atom(self, atoms: Atoms) -> Any:
        """The merged variable or literal of these."""
        pairs = zip(self.places, atoms, strict=True)
        positions = [places.get(v) if is_var(v) else None for places, v in pairs]
        _require_equal(positions)
        if positions[0] is not None:
            return atoms[0]
        _require_equal(_shapes(atoms))
        key = tuple(v if is_var(v) else np.asarray(v.val).tobytes() for v in atoms)
        if not is_var(atoms[0]) and len(set(key)) == 1:
            return atoms[0]
        if key not in self.inputs:
            self.inputs[key] = (atoms, Var(atoms[0].aval))
        return self.inputs[key][1]


def _require_equal(values: Iterable[Any]) -> None:
    """Raise DifferentProgram with the number of the first value that differs from value 0."""
    first, *others = values
    for number, value in enumerate(others, 1):
        if value != first:
            raise DifferentProgram(number)


def _inline_different_calls(programs: Sequence[Any]) -> Sequence[Any]:
    """Inline those calls in which the jaxprs differ."""
    index = 0
    while index < min(len(p.eqns) for p in programs):
        eqns = [p.eqns[index] for p in programs]
        calls = all(e.primitive.name in INLINED for e in eqns)
        if calls and len(set(_texts(eqns))) > 1:
            opened = (inline_call(p, e) for p, e in zip(programs, eqns, strict=True))
            programs = [_without_no_op_casts(p) for p in opened]
        else:
            index += 1
    return programs


class _NoOpCasts(Rewriter[None]):
    """Removes casts to the same dtype: JAX casts a weakly typed number, not a typed one."""

    enters = ()

    def other(self, program: Rewriting[None], eqn: JaxprEqn) -> list[None]:
        if _is_no_op_cast(eqn):
            program.replace(eqn.outvars, [program.atom(eqn.invars[0])])
        else:
            program.emit(eqn)
        return [None] * len(eqn.outvars)


def _without_no_op_casts(program: Any) -> Any:
    return _NoOpCasts().run(program)


def _is_no_op_cast(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _shapes(atoms: Iterable[Any]) -> list[Any]:
    return [(v.aval.shape, v.aval.dtype) for v in atoms]


def _texts(eqns: Sequence[Any]) -> list[str]:
    """The text of each; once for those with the same parameters, as JAX shares traced programs."""
    known: dict[Any, str] = {}
    keys = [tuple((name, id(value)) for name, value in e.params.items()) for e in eqns]
    return [known.get(k) or known.setdefault(k, _text(e)) for k, e in zip(keys, eqns, strict=True)]


def _text(eqn: Any, but: str = "") -> str:
    """An equation's parameters as text, equal for equal computations."""
    text = str([(name, str(value)) for name, value in eqn.params.items() if name != but])
    # The text of a program names its constants without their values.
    values = [np.asarray(const).tobytes() for const in nested_constants(eqn)]
    return re.sub(r" at 0x[0-9a-f]+", "", text) + str(values)
