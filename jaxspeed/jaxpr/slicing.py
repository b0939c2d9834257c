"""Slices of traced programs: some equations, what they read, and what depends on what."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxspeed.jaxpr.traverse import is_var


def part(jaxpr: Any, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Some equations of a jaxpr as a jaxpr of their own."""
    effects = set().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=effects
    )


def slice_of(jaxpr: Any, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """The part of a program that computes `outputs` from `inputs`."""
    known = set(inputs)
    live = {v for v in outputs if is_var(v) and v not in known}
    kept = []
    for eqn in reversed(eqns):
        if any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if is_var(v) and v not in known)
    return part(jaxpr, kept[::-1], inputs, outputs)


def read_by(jaxpr: Any) -> set[Any]:
    """The variables that a program's equations and results read."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v)}
    return read | {v for v in jaxpr.outvars if is_var(v)}


def read_from_outside(eqns: Sequence[Any]) -> list[Any]:
    """The variables that these equations read and do not make."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = (v for eqn in eqns for v in eqn.invars if is_var(v) and v not in made)
    return list(dict.fromkeys(read))


def made_of(jaxpr: Any, sources: Iterable[Any]) -> set[Any]:
    """The variables of a program that depend on any of `sources`, those included."""
    found = set(sources)
    for eqn in jaxpr.eqns:
        if any(is_var(v) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found
