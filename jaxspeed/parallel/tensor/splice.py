"""Putting a function among the equations of a traced program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxspeed.placement.units.jaxprs import CALLS, is_var

# Functions with a derivative of their own: what is written into one pass would miss the other.
OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True)
class Spliced:
    """A function that was traced on its own, to be put among other equations."""

    jaxpr: Any

    @classmethod
    def of(cls, function: Callable[..., Any], like: Sequence[Any]) -> "Spliced":
        """Traced on arrays like these variables."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in like]
        return cls(jax.make_jaxpr(function)(*shapes).jaxpr)

    @property
    def ins(self) -> list[Any]:
        return list(self.jaxpr.invars)

    @property
    def outs(self) -> list[Any]:
        return list(self.jaxpr.outvars)

    def eqns(self, ins: Sequence[Any], outs: Sequence[Any], like: Any) -> list[Any]:
        """Its equations from and to these variables, under the name of the equation `like`."""
        names = dict(zip((*self.ins, *self.outs), (*ins, *outs), strict=True))

        def named(atoms: Sequence[Any]) -> list[Any]:
            return [names.get(v, v) if is_var(v) else v for v in atoms]

        return [
            e.replace(
                invars=named(e.invars), outvars=named(e.outvars), source_info=like.source_info
            )
            for e in self.jaxpr.eqns
        ]


def with_functions(eqn: Any, new: Callable[[Any], Any]) -> Any:
    """An equation with `new(function)` for each function that it runs; itself if none changes."""
    name = eqn.primitive.name
    key = {"cond": "branches", "scan": "jaxpr", "while": "body_jaxpr"}.get(name) or CALLS[name]
    old = eqn.params[key]
    found = tuple(map(new, old if name == "cond" else (old,)))
    if all(a is b for a, b in zip(found, old if name == "cond" else (old,), strict=True)):
        return eqn
    return eqn.replace(params={**eqn.params, key: found if name == "cond" else found[0]})
