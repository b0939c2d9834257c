"""Evaluation of jaxprs, equation by equation."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from jaxspeed.jaxpr.primitives import INLINED
from jaxspeed.jaxpr.slicing import free_variables, sub_jaxpr
from jaxspeed.jaxpr.traverse import Body, called, is_real, is_var, like, open_jaxpr


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


def run_scan(
    scan: Any, body: Body, run: Callable[..., Sequence[Any]], values: Sequence[Any]
) -> list[Any]:
    """The results of a scan with `run` for its body; further results of `run` are stacked."""
    consts, carry = values[: body.num_consts], values[body.num_consts : body.first_xs]

    def trip(carried: Any, xs: Any) -> tuple[Any, Any]:
        outs = run(*consts, *carried, *xs)
        return outs[: body.num_carry], outs[body.num_carry :]

    how = {key: scan.params[key] for key in ("length", "reverse", "unroll")}
    carried, stacked = lax.scan(trip, list(carry), list(values[body.first_xs :]), **how)
    return [*carried, *stacked]


def derivative(eqn: Any, *, by_tangents: bool = False) -> Any:
    """A function with a derivative of its own, and that derivative, as one closed jaxpr.

    (operands, cotangents) -> (results, cotangents), or the same of tangents. Operands are the
    variables that the equation reads, and cotangents those of what is real.
    """
    inputs, outputs = free_variables([eqn]), list(eqn.outvars)
    call = as_function(sub_jaxpr(open_jaxpr(called(eqn))[0], [eqn], inputs, outputs))

    def complete(variables: list[Any], some: Any) -> list[Any]:
        left = iter(some)
        return [
            next(left) if is_real(v) else np.zeros(v.aval.shape, jax.dtypes.float0)
            for v in variables
        ]

    def both(args: Any, seeds: Any) -> list[Any]:
        if by_tangents:
            outs, derivatives = jax.jvp(call, args, complete(inputs, seeds))
        else:
            outs, pullback = jax.vjp(call, *args)
            derivatives = pullback(complete(outputs, seeds))
        pairs = zip(derivatives, outputs if by_tangents else inputs, strict=True)
        return [*outs, *(x for x, v in pairs if is_real(v))]

    seed_vars = filter(is_real, inputs if by_tangents else outputs)
    return jax.make_jaxpr(both)(like(inputs), like(seed_vars))


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    on_value: Callable[[Any, Any], Any] = lambda var, value: value,
    of: Collection[Any] | None = (),
) -> list[Any]:
    """Run a jaxpr with nested jits inlined, so that values they return unchanged stay identical.

    `on_value(variable, value)` may replace the result of an equation, for the variables `of`; for
    None of every equation, also inside nested jits.
    """
    env = bindings(jaxpr, consts, args)

    def read(atom: Any) -> Any:
        return env[atom] if is_var(atom) else atom.val

    for eqns in _runs(jaxpr.eqns, of):
        results = [v for eqn in eqns for v in eqn.outvars]
        if eqns[0].primitive.name in INLINED:
            inner, inner_consts = open_jaxpr(called(eqns[0]))
            operands = [read(v) for v in eqns[0].invars]
            values = evaluate(inner, inner_consts, operands, on_value, of)
        else:
            free = free_variables(eqns)
            values = as_function(sub_jaxpr(jaxpr, eqns, free, results))(*map(read, free))
        pairs = zip(results, values, strict=True)
        env.update((v, on_value(v, x) if of is None or v in of else x) for v, x in pairs)
    return [read(v) for v in jaxpr.outvars]


def _runs(eqns: Sequence[Any], ends: Collection[Any] | None) -> Iterator[list[Any]]:
    """The equations in turn: each inlined call alone, others up to one that computes an end.

    Many are evaluated at once: each evaluation makes and checks a jaxpr.
    """
    run: list[Any] = []
    for eqn in eqns:
        is_call = eqn.primitive.name in INLINED
        if run and is_call:
            yield run
            run = []
        run.append(eqn)
        if is_call or ends is None or any(v in ends for v in eqn.outvars):
            yield run
            run = []
    if run:
        yield run
