"""Evaluation of jaxprs, equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

from jaxspeed.jaxpr.primitives import INLINED
from jaxspeed.jaxpr.slicing import free_variables, sub_jaxpr
from jaxspeed.jaxpr.traverse import called, is_var, open_jaxpr


def bindings(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> dict[Any, Any]:
    """The values of a jaxpr's variables before its first equation."""
    constvars = jaxpr.constvars if len(consts) else ()
    return dict(zip([*constvars, *jaxpr.invars], [*consts, *args], strict=True))


def as_function(jaxpr: Any, consts: Sequence[Any] = ()) -> Callable[..., list[Any]]:
    """A jaxpr as a function; scopes and source info of its equations are preserved."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))


def run_equation(jaxpr: Any, eqn: Any, value_of: Callable[[Any], Any]) -> list[Any]:
    """The results of one equation of a jaxpr; `value_of` gives the values of variables."""
    free = free_variables([eqn])
    return as_function(sub_jaxpr(jaxpr, [eqn], free, eqn.outvars))(*map(value_of, free))


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    on_value: Callable[[Any, Any], Any] = lambda var, value: value,
) -> list[Any]:
    """Run a jaxpr with nested jits inlined, so that values they return unchanged stay identical.

    `on_value(variable, value)` may replace the result of an equation, also inside nested jits.
    """
    env = bindings(jaxpr, consts, args)

    def read(atom: Any) -> Any:
        return env[atom] if is_var(atom) else atom.val

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in INLINED:
            inner, inner_consts = open_jaxpr(called(eqn))
            values = evaluate(inner, inner_consts, [read(v) for v in eqn.invars], on_value)
        else:
            values = run_equation(jaxpr, eqn, env.__getitem__)
        pairs = zip(eqn.outvars, values, strict=True)
        env.update((v, on_value(v, value)) for v, value in pairs)
    return [read(v) for v in jaxpr.outvars]
