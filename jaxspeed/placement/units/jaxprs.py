"""Small tools for programs as JAX traces them."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
INLINED = ("jit", "pjit", "closed_call", "core_call")


def is_var(atom: Any) -> bool:
    """A variable, not a literal."""
    return not hasattr(atom, "val")


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of what an equation holds; jax 0.12 keeps open jaxprs in some of them."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def called(eqn: Any) -> Any:
    """What a call runs."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def runs(eqn: Any, names: Sequence[str]) -> bool:
    """Whether an equation, or one within it, is of one of these primitives."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else [p])]
    inner = [getattr(v, "jaxpr", v) for v in values]
    return eqn.primitive.name in names or any(
        runs(e, names) for v in inner if hasattr(v, "eqns") for e in v.eqns
    )


def bindings(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> dict[Any, Any]:
    """The values of a jaxpr's variables before its first equation."""
    constvars = jaxpr.constvars if len(consts) else ()
    return dict(zip([*constvars, *jaxpr.invars], [*consts, *args], strict=True))


def part(jaxpr: Any, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Some equations of a jaxpr as a jaxpr of their own."""
    effects = set().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=effects
    )


def as_function(jaxpr: Any, consts: Sequence[Any] = ()) -> Callable[..., list[Any]]:
    """A jaxpr as a function; names and sources of its equations are kept."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    on_value: Callable[[Any, Any], Any] = lambda var, value: value,
) -> list[Any]:
    """Run a jaxpr with nested jits inlined, so that what passes through them keeps its identity.

    `on_value(variable, value)` may replace what an equation gave, also inside of them, for all that
    follows.
    """
    env = bindings(jaxpr, consts, args)

    def read(atom: Any) -> Any:
        return env[atom] if is_var(atom) else atom.val

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in INLINED:
            inner, inner_consts = open_jaxpr(called(eqn))
            values = evaluate(inner, inner_consts, [read(v) for v in eqn.invars], on_value)
        else:
            free = list(dict.fromkeys(v for v in eqn.invars if is_var(v)))
            values = as_function(part(jaxpr, [eqn], free, eqn.outvars))(*(env[v] for v in free))
        pairs = zip(eqn.outvars, values, strict=True)
        env.update((v, on_value(v, value)) for v, value in pairs)
    return [read(v) for v in jaxpr.outvars]
