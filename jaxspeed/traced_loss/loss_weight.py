"""The weight of a micro-batch's loss: the part of the traced loss that computes it.

Before its loss, it is evaluated from the result backward, and only what is needed, also of inner
programs. A sum of several values at once, as of a loss and its weight, is evaluated for one.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, partial_eval

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.inline_calls import with_all_calls_inlined
from jaxspeed.jaxpr.slicing import free_variables, slice_of, sub_jaxpr
from jaxspeed.jaxpr.traverse import ClosedJaxpr, Jaxpr, JaxprEqn, Var, is_var, shape_of
from jaxspeed.placement.paths import listed
from jaxspeed.traced_loss.loss import TermWeights
from jaxspeed.traced_loss.loss_program import LossProgram


def weights_of(program: LossProgram, batch: Any) -> TermWeights:
    """The weights of a batch as the loss reads it, of all its terms.

    Raises:
      ModelError: a weight depends on more than the batch.
    """
    closed, loss = program.closed, program.loss_outputs
    known = dict(zip(program.batch, jax.tree.leaves(batch), strict=True))
    known |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    at = TermWeights(loss.weight, tuple(term.weight for term in loss.terms))
    weights: TermWeights = jax.tree.map(
        lambda i: _evaluated(closed.jaxpr, closed.jaxpr.outvars[i], known), at
    )
    return weights


def with_weight_differentiated(program: LossProgram, trained: Collection[str]) -> LossProgram:
    """The loss whose weight has its gradient, if it has one with respect to trained parameters.

    The weight is a number of samples or tokens in almost all losses: `parse_loss` stops its
    gradient, and only here it is looked whether there is one.

    Raises:
      ModelError: the weight of one of several terms has one.
    """
    jaxpr, loss = program.closed.jaxpr, program.loss_outputs
    for term in loss.terms:
        if term.weight is not None and (
            trained_weight := _trained_weight(program, term.weight, trained)
        ):
            raise ModelError(
                "a weight of loss_fn's Terms depends on parameters that are trained "
                f"({listed(trained_weight[1])}): return (sum, jax.lax.stop_gradient(weight)), or "
                "the mean"
            )
    if not (trained_weight := _trained_weight(program, loss.weight, trained)):
        return program
    weight, paths = trained_weight
    outvars = [weight if i == loss.weight else v for i, v in enumerate(jaxpr.outvars)]
    differentiated = program.rewritten(jaxpr.replace(outvars=outvars))
    return replace(differentiated, weight_parameters=paths)


def _trained_weight(
    program: LossProgram, at: Any, trained: Collection[str]
) -> tuple[Any, tuple[str, ...]] | None:
    """(the result `at` before its gradient is stopped, the trained parameters of the gradient)."""
    jaxpr = program.closed.jaxpr
    stops = [e for e in jaxpr.eqns if jaxpr.outvars[at] in e.outvars]
    if not stops or stops[0].primitive.name != "stop_gradient" or not is_var(stops[0].invars[0]):
        return None
    (weight,) = stops[0].invars
    inputs = [*jaxpr.constvars, *jaxpr.invars]

    def weight_alone(*values: Any) -> Any:
        return _evaluated(jaxpr, weight, dict(zip(inputs, values, strict=True)))

    closed = jax.make_jaxpr(weight_alone)(*(v.aval for v in inputs))
    needed, is_read = partial_eval.dce_jaxpr(closed.jaxpr, [True])
    read = {v for v, on in zip(inputs, is_read, strict=True) if on}
    paths = {v: path for path, v in program.parameters.items() if path in trained and v in read}
    moves = [v in paths for v in inputs if v in read]
    if not any(moves) or not ad.jvp_jaxpr(ClosedJaxpr(needed, closed.consts), moves, False)[1][0]:
        return None
    return weight, tuple(paths.values())


def _evaluated(jaxpr: Jaxpr, weight: Any, known: Mapping[Var, Any]) -> Any:
    """The weight, by what is known of a program's inputs."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    # A custom derivative that returns a sum and its weight has tangents for both.
    inlined = with_all_calls_inlined(slice_of(jaxpr, jaxpr.eqns, inputs, [weight]))
    known_inputs = {v: known[w] for v, w in zip(inlined.invars, inputs, strict=True) if w in known}
    return _Needed(inlined, known_inputs).value(inlined.outvars[0])


class _Needed:
    """Values of a program, each computed when it is asked for."""

    def __init__(self, jaxpr: Jaxpr, known: Mapping[Var, Any]) -> None:
        self.jaxpr, self.known = jaxpr, dict(known)
        self.made: dict[Any, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def value(self, atom: Any) -> Any:
        if not is_var(atom):
            return atom.val
        if atom not in self.known:
            self.known[atom] = self._computed(atom)
        return self.known[atom]

    def _computed(self, v: Var) -> Any:
        eqn = self.made.get(v)
        if eqn is None:
            raise ModelError(
                "loss_fn returned several terms, or (sum, weight, auxiliary), and the weight "
                "depends on more than the batch: with several micro-batches it has to be known "
                "before the loss, as the number of tokens that count is"
            )
        if eqn.primitive.name == "unstack" and eqn.params["axis"] == 0:
            return self._row(eqn.invars[0], eqn.outvars.index(v))
        if eqn.primitive.name == "squeeze" and (row := self._sliced(eqn)):
            return self._row(*row)
        alone = sub_jaxpr(self.jaxpr, [eqn], free_variables([eqn]), [v])
        needed, read = partial_eval.dce_jaxpr(alone, [True])
        inputs = [x for x, is_read in zip(alone.invars, read, strict=True) if is_read]
        return as_function(needed)(*map(self.value, inputs))[0]

    def _sliced(self, eqn: JaxprEqn) -> tuple[Any, int] | None:
        """(array, number) if an equation computes one of the rows of an array."""
        taken = self.made.get(eqn.invars[0])
        if taken is None or taken.primitive.name != "slice" or 0 not in eqn.params["dimensions"]:
            return None
        shape, (first, *rest) = shape_of(taken.invars[0]), taken.params["start_indices"]
        is_row = taken.params["limit_indices"] == (first + 1, *shape[1:]) and not any(rest)
        return (taken.invars[0], first) if is_row and eqn.params["dimensions"] == (0,) else None

    def _row(self, atom: Any, number: int) -> Any:
        """One row of an array along its first dim."""
        eqn = self.made.get(atom) if is_var(atom) else None
        name = eqn.primitive.name if eqn else ""
        if eqn and name == "reduce_sum" and 0 not in eqn.params["axes"]:
            axes = tuple(axis - 1 for axis in eqn.params["axes"])
            return lax.reduce_sum_p.bind(
                self._row(eqn.invars[0], number), **{**eqn.params, "axes": axes}
            )
        if eqn and name == "reshape" and shape_of(eqn.invars[0])[:1] == shape_of(atom)[:1]:
            return self._row(eqn.invars[0], number).reshape(shape_of(atom)[1:])
        if eqn and name == "stack" and eqn.params["axis"] == 0:
            return self.value(eqn.invars[number])
        rows = [v for v in eqn.invars if shape_of(v)[:1] == (1,)] if eqn else []
        if eqn and name == "concatenate" and not eqn.params["dimension"] and rows == eqn.invars:
            return self.value(eqn.invars[number])[0]
        return self.value(atom)[number]
