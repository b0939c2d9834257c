"""The choices of a mixture's routers: recorded where tokens are sampled, replayed in training.

A router that rounds otherwise chooses other experts, and a token has the log-probability of another
model. A loss whose batch has ROUTING takes the choices from there, its own where they are below 0;
the weights of the experts, and their gradients, are still of its own logits (arXiv:2510.11370).

Choices are the values of the name DECISION, in the program's order; a scan has one in each trip.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxspeed.axes import PIPE
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.jaxpr.evaluate import as_function, run_scan
from jaxspeed.jaxpr.primitives import CHECKPOINTS, INLINED
from jaxspeed.jaxpr.rewriter import Rewriter, Rewriting
from jaxspeed.jaxpr.slicing import renamed
from jaxspeed.jaxpr.traverse import (
    Jaxpr,
    JaxprEqn,
    Var,
    bodies,
    contains,
    shape_of,
    with_functions,
    with_jaxpr,
)
from jaxspeed.objectives.model_logprobs import ROUTING
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.ops.moe.routing import DECISION, TAKEN
from jaxspeed.traced_loss.loss_program import LossProgram


def with_choices_recorded(program: LossProgram) -> LossProgram:
    """The loss, which writes the choices of its routers as ROUTING, if it has any."""
    lift = _Lift(replays=False)
    rewriting = lift.write(program.closed.jaxpr)
    if not lift.choices:
        return program

    def joined(*choices: jax.Array) -> jax.Array:
        of_routers = [x.reshape(-1, *x.shape[-3:]) for x in choices]
        return jnp.moveaxis(jnp.concatenate(of_routers), 0, 2)

    routing = rewriting.splice(joined, lift.choices, None)
    jaxpr, tree = rewriting.finished(), program.out_tree
    loss, after = jax.tree.unflatten(tree, range(tree.num_leaves))
    results = loss, {**after, ROUTING: tree.num_leaves}
    outs = [*jaxpr.outvars, *routing]
    jaxpr = jaxpr.replace(outvars=[outs[i] for i in jax.tree.leaves(results)])
    return replace(program.rewritten(jaxpr), out_tree=jax.tree.structure(results))


def with_choices_replayed(program: LossProgram, routing: Var) -> LossProgram:
    """The loss, whose routers take the choices of `routing`, an array of the batch."""
    if free_axes().get(PIPE, 1) > 1:
        raise ConfigError(f"the batch has {ROUTING}, which is not replayed over an axis pipe")
    lift = _Lift(replays=True)
    jaxpr = lift.write(program.closed.jaxpr).finished()
    counts = [math.prod(shape_of(v)[:-3]) for v in lift.choices]
    for v in lift.choices:
        batch, seq, k = shape_of(v)[-3:]
        if shape_of(routing) != (wanted := (batch, seq, sum(counts), k)):
            raise ModelError(
                f"the batch's {ROUTING} is {shape_of(routing)}, and the model's routers choose "
                f"{wanted}: [batch, seq, routers, k]"
            )

    def separate(routing: jax.Array) -> list[jax.Array]:
        of_routers, parts = jnp.moveaxis(routing, 2, 0), []
        for v, count in zip(lift.choices, counts, strict=True):
            parts.append(of_routers[:count].reshape(shape_of(v)))
            of_routers = of_routers[count:]
        return parts

    closed = jax.make_jaxpr(separate)(jax.ShapeDtypeStruct(shape_of(routing), jnp.int32))
    names: dict[Any, Any] = dict(zip(closed.jaxpr.outvars, lift.choices, strict=True))
    names |= dict(zip(closed.jaxpr.invars, [routing], strict=True))
    first = [
        eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names))
        for eqn in closed.jaxpr.eqns
    ]
    return program.rewritten(jaxpr.replace(eqns=[*first, *jaxpr.eqns]))


class _Lift(Rewriter[None]):
    """Makes the choices in a program its further results or, to replay them, its further inputs.

    Attributes:
      choices: their variables in the new program, [..., batch, seq, k] with the trips of scans.
    """

    def __init__(self, replays: bool) -> None:
        super().__init__()
        self.replays = replays
        self.choices: list[Var] = []

    def lifted(self, jaxpr: Jaxpr) -> Jaxpr:
        new = self.run(jaxpr)
        if self.replays:
            return new.replace(invars=[*new.invars, *self.choices])
        return new.replace(outvars=[*new.outvars, *self.choices])

    def equation(self, program: Rewriting[None], eqn: JaxprEqn) -> Sequence[None]:
        name = eqn.primitive.name
        if not contains(eqn, _is_of_router):
            program.emit(eqn)
        elif name == "name":
            self._choice(program, eqn)
        elif name in INLINED:
            program.inline(eqn)
        elif name == "scan" or name in CHECKPOINTS:
            self._body(program, eqn)
        else:
            raise ModelError(f"a router is in a {name}, from where its choices are not recorded")
        return [None] * len(eqn.outvars)

    def _choice(self, program: Rewriting[None], eqn: JaxprEqn) -> None:
        if eqn.params["name"] == TAKEN:
            raise ConfigError(
                "a router has a capacity_factor: which tokens it drops depends on the others of a "
                "batch, and a sampler has other ones; rollouts take a mixture without it"
            )
        (chosen,), (out,) = eqn.invars, eqn.outvars
        if not self.replays:
            program.emit(eqn)
            self.choices.append(program.atom(out))
            return
        self.choices.append(Var(out.aval))

        def replayed(chosen: jax.Array, choice: jax.Array) -> jax.Array:
            return checkpoint_name(jnp.where(choice < 0, chosen, choice), DECISION)

        operands = [program.atom(chosen), self.choices[-1]]
        program.replace([out], program.splice(replayed, operands, eqn))

    def _body(self, program: Rewriting[None], eqn: JaxprEqn) -> None:
        (body,) = bodies(eqn)
        lift = _Lift(self.replays)
        inner = lift.lifted(body.jaxpr)
        is_scan = eqn.primitive.name == "scan"
        trips = (body.trips,) * is_scan
        further = [Var(v.aval.update(shape=(*trips, *shape_of(v)))) for v in lift.choices]
        operands = [program.atom(v) for v in eqn.invars]
        if self.replays:
            operands += further
        if is_scan:

            def run(*values: jax.Array) -> list[jax.Array]:
                return run_scan(eqn, body, as_function(inner, body.consts), values)

            results = program.splice(run, operands, eqn)
        else:
            outs = [*eqn.outvars, *(() if self.replays else further)]
            call = with_functions(eqn, lambda held: with_jaxpr(held, inner))
            program.eqns.append(call.replace(invars=operands, outvars=outs))
            results = outs
        count = len(eqn.outvars)
        program.replace(eqn.outvars, results[:count])
        self.choices += further if self.replays else results[count:]


def _is_of_router(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] in (DECISION, TAKEN)
