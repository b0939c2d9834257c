"""Evaluation and slicing of jaxprs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
INLINED = ("jit", "pjit", "closed_call", "core_call")
# Primitives that run one function of theirs on their operands, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def is_var(atom: Any) -> bool:
    """A variable, not a literal."""
    return not hasattr(atom, "val")


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of what an equation holds; jax 0.12 keeps open jaxprs in some of them."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def called(eqn: Any) -> Any:
    """What a call runs."""
    return next(eqn.params[k] for k in ("call_jaxpr", "fun_jaxpr", "jaxpr") if k in eqn.params)


def consts_and_carry(scan: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many its carry."""
    if "num_carry" in scan.params:
        return scan.params["num_consts"], scan.params["num_carry"]
    consts, carry = scan.params["ft_in"].unpack()[:2]  # jax 0.12
    return len(consts), len(carry)


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


def forwarded(jaxpr: Any) -> list[Any]:
    """For each result of a jaxpr the input variable that it is, unchanged; None for all others.

    Looked for inside of calls, loops and branches too: what a jit returns as it came is the same.
    """
    origin = {v: v for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for out, i in zip(eqn.outvars, _forwarded_operands(eqn)):
            if i is not None and is_var(eqn.invars[i]) and eqn.invars[i] in origin:
                origin[out] = origin[eqn.invars[i]]
    return [origin.get(v) if is_var(v) else None for v in jaxpr.outvars]


def _forwarded_operands(eqn: Any) -> list[int | None]:
    """For each result of an equation the operand that it is; empty where nothing is known."""
    name = eqn.primitive.name
    if name == "cond":
        branches = [_places(open_jaxpr(branch)[0]) for branch in eqn.params["branches"]]
        same = [found[0] if len({*found}) == 1 else None for found in zip(*branches)]
        return [None if i is None else i + 1 for i in same]
    if name == "while":
        consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        own = eqn.params["body_nconsts"]  # before the carry, in the body
        places = _places(open_jaxpr(eqn.params["body_jaxpr"])[0])
        return [consts + i if found == own + i else None for i, found in enumerate(places)]
    if name not in (*CALLS, "scan"):
        return []
    places = _places(open_jaxpr(called(eqn))[0])
    if name != "scan":
        return places
    # A carry that comes out as it went in, and a slice of an input that is stacked up again.
    consts, carry = consts_and_carry(eqn)
    return [
        found
        if found is not None and (found == consts + i if i < carry else found >= consts + carry)
        else None
        for i, found in enumerate(places)
    ]


def _places(jaxpr: Any) -> list[int | None]:
    """`forwarded`, by the inputs' places."""
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    return [None if v is None else place[v] for v in forwarded(jaxpr)]


def bodies(eqn: Any) -> list[tuple[Any, int, int]]:
    """[(jaxpr, its first operand's index, trips)] of an equation that the slicing goes into."""
    name = eqn.primitive.name
    if name == "cond":
        return [(open_jaxpr(b)[0], 1, 1) for b in eqn.params["branches"]]
    if name in ("jit", "pjit", "closed_call", "remat2", "checkpoint"):
        return [(open_jaxpr(called(eqn))[0], 0, 1)]
    if name == "scan":
        return [(open_jaxpr(called(eqn))[0], 0, eqn.params["length"])]
    return []


# -- putting a function among the equations of a traced program -----------------------------------

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
