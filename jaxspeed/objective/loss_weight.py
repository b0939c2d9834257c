"""The weight of a micro-batch before its loss: the part of the traced loss that computes it.

It is evaluated from the result backward, and only what is needed, also of inner programs. A sum of
several values at once, as of a loss and its weight, is evaluated for one of them.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.interpreters import partial_eval

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.primitives import INLINED
from jaxspeed.jaxpr.slicing import free_variables, sub_jaxpr
from jaxspeed.jaxpr.traverse import Jaxpr, JaxprEqn, Var, called, is_marked, is_var, open_jaxpr
from jaxspeed.objective.loss_program import LossProgram
from jaxspeed.tensor_parallel.dim_propagation import shape_of


def weight_of(program: LossProgram, batch: Any) -> jax.Array:
    """The weight of a batch as the loss reads it.

    Raises:
      ModelError: the weight depends on more than the batch.
    """
    closed = program.closed
    known = dict(zip(program.batch, jax.tree.leaves(batch), strict=True))
    known |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    at = program.loss_outputs.weight
    weight: jax.Array = _Needed(closed.jaxpr, known).value(closed.jaxpr.outvars[at])
    return weight


class _Needed:
    """Values of a program, each computed when it is asked for."""

    def __init__(self, jaxpr: Jaxpr, known: Mapping[Var, Any], outer: Any = None) -> None:
        self.jaxpr, self.known, self.outer = jaxpr, dict(known), outer
        self.made: dict[Any, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def value(self, atom: Any) -> Any:
        if not is_var(atom):
            return atom.val
        if atom not in self.known:
            self.known[atom] = self._computed(atom)
        return self.known[atom]

    def _computed(self, v: Var) -> Any:
        if self.outer and v in self.outer:  # an input of a call
            needed, atom = self.outer[v]
            return needed.value(atom)
        eqn = self.made.get(v)
        if eqn is None:
            raise ModelError(
                "loss_fn returned (sum, weight, auxiliary), and the weight depends on more than "
                "the batch: with several micro-batches it has to be known before the loss, as the "
                "number of tokens that count is"
            )
        if eqn.primitive.name == "unstack" and eqn.params["axis"] == 0:
            return self._row(eqn.invars[0], eqn.outvars.index(v))
        if eqn.primitive.name == "squeeze" and (row := self._sliced(eqn)):
            return self._row(*row)
        if eqn.primitive.name in INLINED and not is_marked(eqn):
            body, consts = open_jaxpr(called(eqn))
            given = zip(body.invars, eqn.invars, strict=True)
            inside = {inner: (self, atom) for inner, atom in given}
            own = dict(zip(body.constvars, consts, strict=True))
            return _Needed(body, own, inside).value(body.outvars[eqn.outvars.index(v)])
        alone = sub_jaxpr(self.jaxpr, [eqn], free_variables([eqn]), [v])
        needed, read = partial_eval.dce_jaxpr(alone, [True])
        inputs = [x for x, is_read in zip(alone.invars, read, strict=True) if is_read]
        return as_function(needed)(*map(self.value, inputs))[0]

    def _sliced(self, eqn: JaxprEqn) -> tuple[Any, int] | None:
        """(array, number) if an equation computes one of the rows of an array."""
        cut = self.made.get(eqn.invars[0])
        if cut is None or cut.primitive.name != "slice" or 0 not in eqn.params["dimensions"]:
            return None
        shape, (first, *rest) = shape_of(cut.invars[0]), cut.params["start_indices"]
        is_row = cut.params["limit_indices"] == (first + 1, *shape[1:]) and not any(rest)
        return (cut.invars[0], first) if is_row and eqn.params["dimensions"] == (0,) else None

    def _row(self, atom: Any, number: int) -> Any:
        """One row of an array along its first dim."""
        eqn = self.made.get(atom) if is_var(atom) else None
        name = eqn.primitive.name if eqn else ""
        if eqn and name == "reduce_sum" and 0 not in eqn.params["axes"]:
            axes = tuple(axis - 1 for axis in eqn.params["axes"])
            return lax.reduce_sum_p.bind(
                self._row(eqn.invars[0], number), **{**eqn.params, "axes": axes}
            )
        if eqn and name == "stack" and eqn.params["axis"] == 0:
            return self.value(eqn.invars[number])
        rows = [v for v in eqn.invars if shape_of(v)[:1] == (1,)] if eqn else []
        if eqn and name == "concatenate" and not eqn.params["dimension"] and rows == eqn.invars:
            return self.value(eqn.invars[number])[0]
        return self.value(atom)[number]
