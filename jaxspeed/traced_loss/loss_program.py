"""`LossProgram`: a traced loss, or a part of one, as passes rewrite it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jax.tree_util import tree_unflatten

from jaxspeed.adapters.adapter import PREFIX
from jaxspeed.config import match
from jaxspeed.jaxpr.primitives import RANDOM
from jaxspeed.jaxpr.traverse import ClosedJaxpr, Jaxpr, Var, runs, shape_of
from jaxspeed.sequence_parallel import LeftAlone
from jaxspeed.tensor_parallel.dim_propagation import propagate_dims
from jaxspeed.tensor_parallel.sequence_dims import SequenceDims
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.user_models.own_axes import OwnAxes
from jaxspeed.zero3 import Units, choose_units, outermost_calls


@dataclass(frozen=True)
class LossProgram:
    """A traced loss, or a part of one.

    Attributes:
      closed: the program.
      parameters: its input variables that are parameters, by path.
      batch: those that are arrays of samples: the batch's; of a part, activations too.
      variables: the paths of those that are other variables of the model.
      out_tree: of the results: of the loss, (the loss, what it changed by path).
      unit_patterns: of the config.
      is_sum: the loss function returned (sum, weight).
      own_axes: axis names of the model.
      positions: the sequence dims of those that have one.
      left_alone: its attention that is not recognized, where an axis shards sequences.
      weight_parameters: those that the weight of the loss depends on, which then has its gradient.
      loss: the traced loss that this is a part of, or was rewritten from.
    """

    closed: ClosedJaxpr
    parameters: Mapping[str, Var]
    batch: Sequence[Var]
    out_tree: Any
    variables: Mapping[Var, str] = field(default_factory=dict)
    unit_patterns: Sequence[str] = ()
    is_sum: bool = True
    own_axes: OwnAxes = field(default_factory=lambda: OwnAxes((), ()))
    positions: Mapping[Var, int] = field(default_factory=dict)
    left_alone: tuple[LeftAlone, ...] = ()
    weight_parameters: tuple[str, ...] = ()
    loss: "LossProgram | None" = None

    def rewritten(self, jaxpr: Jaxpr) -> "LossProgram":
        """The same with another jaxpr, whose inputs correspond."""
        if jaxpr is self.closed.jaxpr:
            return self
        names = dict(zip(self.closed.jaxpr.invars, jaxpr.invars, strict=True))
        return replace(
            self,
            closed=ClosedJaxpr(jaxpr, self.closed.consts),
            parameters={path: names[v] for path, v in self.parameters.items()},
            batch=[names[v] for v in self.batch],
            variables={names[v]: path for v, path in self.variables.items()},
            positions={names[v]: dim for v, dim in self.positions.items()},
        )

    def part(
        self, closed: ClosedJaxpr, parameters: Mapping[str, Var], batch: Sequence[Var]
    ) -> "LossProgram":
        """A part of this loss, with the roles of its inputs.

        Activations between parts are recognized by their lengths.
        """
        loss = self.loss or self
        positions = {
            v: dim
            for v in batch
            for dim in [d for d, n in enumerate(shape_of(v)) if d and n in loss.lengths][:1]
        }
        return LossProgram(closed, parameters, batch, None, positions=positions, loss=loss)

    @cached_property
    def lengths(self) -> frozenset[int]:
        """The lengths of the sequences of the loss."""
        if not self.positions:
            return frozenset()
        propagated = propagate_dims(self.closed.jaxpr, self.parameters, self.batch)
        return SequenceDims(propagated, self.positions, 1).lengths

    @cached_property
    def units(self) -> Units:
        """The units of the traced loss, which the name stacks of all its parts name."""
        if self.loss:
            return self.loss.units
        return choose_units(self.closed.jaxpr, self._own, self.unit_patterns, match)

    @cached_property
    def outermost(self) -> Units:
        """The units of a model in which nothing repeats: the calls of the loss."""
        if self.loss:
            return self.loss.outermost
        return outermost_calls(self.closed.jaxpr, self._own)

    @property
    def _own(self) -> list[Var]:
        """The model's own parameters: adapters, which some layers may have, decide on no unit."""
        return [v for path, v in self.parameters.items() if not path.startswith(PREFIX)]

    @property
    def draws_random_numbers(self) -> bool:
        return any(runs(eqn, RANDOM) for eqn in self.closed.jaxpr.eqns)

    @property
    def loss_outputs(self) -> Loss:
        """The loss, as the indices of the results."""
        loss: Loss = tree_unflatten(self.out_tree, range(self.out_tree.num_leaves))[0]
        return loss

    @property
    def written(self) -> frozenset[str]:
        """Parameters and variables (such as statistics) that the loss changes."""
        _, after = tree_unflatten(self.out_tree, range(self.out_tree.num_leaves))
        return frozenset(after)
