"""Inlining of calls and checkpoints in a traced program."""

from collections.abc import Callable, Collection

from jaxspeed.jaxpr.primitives import CALLS, CHECKPOINTS, INLINED
from jaxspeed.jaxpr.rewriter import Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, Var, is_marked, is_var


def with_calls_inlined(jaxpr: Jaxpr, variables: Collection[Var]) -> Jaxpr:
    """Inline every call that reads one of these variables, also within inlined calls."""
    return _inlined(
        jaxpr,
        lambda eqn: (
            eqn.primitive.name in INLINED
            and not is_marked(eqn)
            and any(is_var(v) and v in variables for v in eqn.invars)
        ),
    )


def inline_call(jaxpr: Jaxpr, call: JaxprEqn) -> Jaxpr:
    """Replace one call by the equations of its program."""
    return _inlined(jaxpr, lambda eqn: eqn is call)


def with_all_calls_inlined(jaxpr: Jaxpr) -> Jaxpr:
    """Replace all calls by their programs: checkpoints and custom derivatives as well."""
    return _inlined(jaxpr, lambda eqn: eqn.primitive.name in CALLS)


def with_checkpoints_inlined(jaxpr: Jaxpr, policy: Callable[..., bool]) -> Jaxpr:
    """Replace the checkpoints that have this policy by their programs."""
    return _inlined(
        jaxpr,
        lambda eqn: eqn.primitive.name in CHECKPOINTS and eqn.params["policy"] is policy,
    )


def _inlined(jaxpr: Jaxpr, chosen: Callable[[JaxprEqn], bool]) -> Jaxpr:
    class Inlining(Rewriter[None]):
        enters = ()

        def other(self, program: Rewriting[None], eqn: JaxprEqn) -> list[None]:
            (program.inline if chosen(eqn) else program.emit)(eqn)
            return [None] * len(eqn.outvars)

    return Inlining().run(jaxpr)
