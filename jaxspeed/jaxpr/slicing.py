"""Slices of traced programs: sub-jaxprs, free variables, dependents, backward slices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, is_var


def renamed(atoms: Iterable[Any], names: Mapping[Any, Any]) -> list[Any]:
    """The atoms, with variables substituted by `names`."""
    return [names.get(v, v) if is_var(v) else v for v in atoms]


def sub_jaxpr(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Jaxpr:
    """A subset of a jaxpr's equations as a jaxpr."""
    effects = set().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=effects
    )


def slice_of(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Jaxpr:
    """The backward slice of a program: the equations that compute `outputs` from `inputs`."""
    known = set(inputs)
    live = {v for v in outputs if is_var(v) and v not in known}
    needed = []
    for eqn in reversed(eqns):
        if any(v in live for v in eqn.outvars):
            needed.append(eqn)
            live.update(v for v in eqn.invars if is_var(v) and v not in known)
    return sub_jaxpr(jaxpr, needed[::-1], inputs, outputs)


def read_by(jaxpr: Jaxpr) -> set[Any]:
    """The variables that a program's equations read, and its results."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v)}
    return read | {v for v in jaxpr.outvars if is_var(v)}


def free_variables(eqns: Sequence[JaxprEqn]) -> list[Any]:
    """The variables that these equations read but do not define."""
    defined = {v for eqn in eqns for v in eqn.outvars}
    read = (v for eqn in eqns for v in eqn.invars if is_var(v) and v not in defined)
    return list(dict.fromkeys(read))


def dependents(jaxpr: Jaxpr, sources: Iterable[Any]) -> set[Any]:
    """The variables of a program that depend on any of `sources`, and these themselves."""
    variables = set(sources)
    for eqn in jaxpr.eqns:
        if any(is_var(v) and v in variables for v in eqn.invars):
            variables.update(eqn.outvars)
    return variables
