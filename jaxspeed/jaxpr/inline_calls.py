"""Inlining of the calls that given variables of a traced program pass through."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jaxspeed.jaxpr.evaluate import INLINED, called, is_var, open_jaxpr, part


def opened(jaxpr: Any, variables: set[Any]) -> Any:
    """The program with every call inlined that reads one of these variables."""
    while True:
        found = ((i, e) for i, e in enumerate(jaxpr.eqns) if e.primitive.name in INLINED)
        at, call = next(
            ((i, e) for i, e in found if any(is_var(v) and v in variables for v in e.invars)),
            (0, None),
        )
        if call is None:
            return jaxpr
        jaxpr = inlined(jaxpr, at, call)


def inlined(jaxpr: Any, at: int, call: Any) -> Any:
    """The program with one call replaced by what it calls."""
    inner, consts = open_jaxpr(called(call))
    # Traced again: a function that is called twice would have the same variables twice.
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars]
    fresh = jax.make_jaxpr(jex.jaxpr_as_fun(jex.ClosedJaxpr(inner, list(consts))))(*shapes)
    inner = fresh.jaxpr
    names = dict(zip(inner.invars, call.invars, strict=True))
    constants = dict(zip(inner.constvars, fresh.consts, strict=True))
    assert not constants, "constants of a call are arguments of it"
    outer = call.source_info.name_stack
    eqns = [
        e.replace(
            invars=_renamed(e.invars, names),
            source_info=e.source_info.replace(name_stack=outer + e.source_info.name_stack),
        )
        for e in inner.eqns
    ]
    results = _renamed(inner.outvars, names)
    passed = dict(zip(call.outvars, results, strict=True))
    later = [e.replace(invars=_renamed(e.invars, passed)) for e in jaxpr.eqns[at + 1 :]]
    eqns = [*jaxpr.eqns[:at], *eqns, *later]
    return jaxpr.replace(eqns=eqns, outvars=_renamed(jaxpr.outvars, passed))


def _renamed(atoms: Iterable[Any], names: dict[Any, Any]) -> list[Any]:
    return [names.get(v, v) if is_var(v) else v for v in atoms]


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
