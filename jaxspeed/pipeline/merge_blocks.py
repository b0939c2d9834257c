"""Merging of equal programs into one, with inputs for what differs between them.

They are gone through side by side, and what stands at one place is compared. What a program made
itself is as it is in the others; what it reads from outside is an input of the one program, and so
is a number in which they differ. That may stand inside a jit, which then is inlined, or inside a
jax.checkpoint, which is handed it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxspeed.jaxpr.inline_calls import inlined, renamed
from jaxspeed.jaxpr.primitives import CHECKPOINTS, INLINED
from jaxspeed.jaxpr.traverse import called, is_var, open_jaxpr, with_jaxpr

Atoms = tuple[Any, ...]  # of one place: a variable or a literal of each program


class Unlike(Exception):
    """The program of this number computes something else than the first."""

    def __init__(self, number: int) -> None:
        self.number = number


def one_of(programs: Sequence[Any]) -> tuple[Any, list[Atoms]]:
    """(the one program, what the programs have for each of its inputs).

    Raises:
      Unlike: where there is no such program.
    """
    return _one_of(programs, [{} for _ in programs])


def _one_of(programs: Sequence[Any], places: list[dict[Any, Any]]) -> tuple[Any, list[Atoms]]:
    """`places` tells of variables of each program which are the same. Its inputs come last."""
    programs = _with_unlike_calls_open([_without_casts_to_the_same(p) for p in programs])
    first = programs[0]
    _refuse_unlike((len(p.eqns), len(p.outvars)) for p in programs)
    walk = _Walk(places)
    eqns = [walk.equation(i, eqns) for i, eqns in enumerate(zip(*(p.eqns for p in programs)))]
    outs = [walk.atom(atoms) for atoms in zip(*(p.outvars for p in programs))]
    known = [v for v in first.invars if v in places[0]]
    inputs = [variable for _, variable in walk.inputs.values()]
    program = first.replace(constvars=[], invars=[*known, *inputs], outvars=outs, eqns=eqns)
    return program, [atoms for atoms, _ in walk.inputs.values()]


@dataclass
class _Walk:
    """Side by side through programs: where their variables were made, and what they read."""

    places: list[dict[Any, Any]]  # of each program: variable -> where it was made
    inputs: dict[Any, tuple[Atoms, Any]] = field(default_factory=dict)  # ... and the input's name

    def equation(self, index: int, eqns: Atoms) -> Any:
        """The equation of the one program that stands for these."""
        first = eqns[0]
        _refuse_unlike((e.primitive.name, len(e.invars), _shapes(e.outvars)) for e in eqns)
        invars = [self.atom(atoms) for atoms in zip(*(e.invars for e in eqns))]
        params = first.params
        if first.primitive.name in CHECKPOINTS and len(set(map(_text, eqns))) > 1:
            _refuse_unlike(_text(e, but="jaxpr") for e in eqns)
            body, reads = self._body([open_jaxpr(called(e))[0] for e in eqns])
            invars += [self.atom(atoms) for atoms in reads]
            params = {**params, "jaxpr": with_jaxpr(params["jaxpr"], body)}
        else:
            _refuse_unlike(map(_text, eqns))
        for made, e in zip(self.places, eqns, strict=True):
            made.update((v, (index, i)) for i, v in enumerate(e.outvars))
        return first.replace(invars=invars, params=params)

    def _body(self, bodies: Sequence[Any]) -> tuple[Any, list[Atoms]]:
        return _one_of(bodies, [{v: ("in", i) for i, v in enumerate(b.invars)} for b in bodies])

    def atom(self, atoms: Atoms) -> Any:
        """What stands for these in the one program."""
        pairs = zip(self.places, atoms, strict=True)
        made = [places.get(v) if is_var(v) else None for places, v in pairs]
        _refuse_unlike(made)
        if made[0] is not None:
            return atoms[0]
        _refuse_unlike(_shapes(atoms))
        key = tuple(v if is_var(v) else np.asarray(v.val).tobytes() for v in atoms)
        if not is_var(atoms[0]) and len(set(key)) == 1:
            return atoms[0]
        if key not in self.inputs:
            self.inputs[key] = (atoms, _variable(atoms[0].aval))
        return self.inputs[key][1]


def _refuse_unlike(values: Iterable[Any]) -> None:
    """Unlike, with the number of the first that is not as the first of all."""
    first, *others = values
    for number, value in enumerate(others, 1):
        if value != first:
            raise Unlike(number)


def _with_unlike_calls_open(programs: Sequence[Any]) -> Sequence[Any]:
    """The programs with those calls inlined that they do not have in common."""
    index = 0
    while index < min(len(p.eqns) for p in programs):
        eqns = [p.eqns[index] for p in programs]
        calls = all(e.primitive.name in INLINED for e in eqns)
        if calls and len(set(map(_text, eqns))) > 1:
            opened = (inlined(p, index, e) for p, e in zip(programs, eqns, strict=True))
            programs = [_without_casts_to_the_same(p) for p in opened]
        else:
            index += 1
    return programs


def _without_casts_to_the_same(program: Any) -> Any:
    """A number that JAX takes for one of any type is cast where another of that type is not."""
    names: dict[Any, Any] = {}
    eqns = []
    for eqn in program.eqns:
        invars = renamed(eqn.invars, names)
        if _is_to_the_same(eqn):
            names[eqn.outvars[0]] = invars[0]
        else:
            eqns.append(eqn.replace(invars=invars))
    return program.replace(eqns=eqns, outvars=renamed(program.outvars, names))


def _is_to_the_same(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _shapes(atoms: Iterable[Any]) -> list[Any]:
    return [(v.aval.shape, v.aval.dtype) for v in atoms]


def _text(eqn: Any, but: str = "") -> str:
    """An equation's parameters in letters, equal for equal computations."""
    text = str([(name, str(value)) for name, value in eqn.params.items() if name != but])
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _variable(aval: Any) -> Any:
    shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.make_jaxpr(lambda x: x)(shape).jaxpr.invars[0]
