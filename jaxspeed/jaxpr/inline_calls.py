"""Inlining of calls in a traced program, and splicing of traced functions into it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from jaxspeed.jaxpr.primitives import INLINED
from jaxspeed.jaxpr.traverse import called, is_var, open_jaxpr


def with_calls_inlined(jaxpr: Any, variables: set[Any]) -> Any:
    """Inline every call that reads one of these variables."""
    while True:
        found = ((i, e) for i, e in enumerate(jaxpr.eqns) if e.primitive.name in INLINED)
        at, call = next(
            ((i, e) for i, e in found if any(is_var(v) and v in variables for v in e.invars)),
            (0, None),
        )
        if call is None:
            return jaxpr
        jaxpr = inline_call(jaxpr, at, call)


def inline_call(jaxpr: Any, at: int, call: Any) -> Any:
    """Replace one call, equation number `at`, by the equations of its program."""
    inner, consts = open_jaxpr(called(call))
    # Traced again: inlining one jaxpr twice would define its variables twice.
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars]
    fresh = jax.make_jaxpr(jex.jaxpr_as_fun(jex.ClosedJaxpr(inner, list(consts))))(*shapes)
    inner = fresh.jaxpr
    names = dict(zip(inner.invars, call.invars, strict=True))
    constants = zip(inner.constvars, fresh.consts, strict=True)
    names.update((v, jex.Literal(const, v.aval)) for v, const in constants)
    outer = call.source_info.name_stack
    eqns = [
        e.replace(
            invars=renamed(e.invars, names),
            source_info=e.source_info.replace(name_stack=outer + e.source_info.name_stack),
        )
        for e in inner.eqns
    ]
    results = renamed(inner.outvars, names)
    passed = dict(zip(call.outvars, results, strict=True))
    later = [e.replace(invars=renamed(e.invars, passed)) for e in jaxpr.eqns[at + 1 :]]
    eqns = [*jaxpr.eqns[:at], *eqns, *later]
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, passed))


def renamed(atoms: Iterable[Any], names: Mapping[Any, Any]) -> list[Any]:
    """The atoms, with variables substituted by `names`."""
    return [names.get(v, v) if is_var(v) else v for v in atoms]


@dataclass(frozen=True)
class Spliced:
    """A separately traced function, whose equations are inserted among others."""

    jaxpr: Any

    @classmethod
    def of(cls, function: Callable[..., Any], like: Sequence[Any]) -> "Spliced":
        """Trace on arrays with the shapes and dtypes of these variables."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in like]
        return cls(jax.make_jaxpr(function)(*shapes).jaxpr)

    @property
    def ins(self) -> list[Any]:
        return list(self.jaxpr.invars)

    @property
    def outs(self) -> list[Any]:
        return list(self.jaxpr.outvars)

    def eqns(self, ins: Sequence[Any], outs: Sequence[Any], like: Any) -> list[Any]:
        """Its equations on these variables, with the source info of the equation `like`."""
        names = dict(zip((*self.ins, *self.outs), (*ins, *outs), strict=True))
        return [
            e.replace(
                invars=renamed(e.invars, names),
                outvars=renamed(e.outvars, names),
                source_info=like.source_info,
            )
            for e in self.jaxpr.eqns
        ]
