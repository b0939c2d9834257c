"""The parts of a split loss, with the values of one step.

It is traced as the context asks: in a lane, where `pipe` is manual, kernels and constraints see
another mesh than in the global view.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.objective.objective import Objective, Traced
from jaxspeed.objective.train_state import Arrays, unpad
from jaxspeed.pipeline.split_loss import LossParts, parts_of
from jaxspeed.pipeline.stage_layout import Arrangement
from jaxspeed.placement.table import PlacementTable

Values = list[Any]


@dataclass(frozen=True)
class Split:
    """The parts of a loss and what they read; `sources` and `micro` are those of one step."""

    objective: Objective
    arrangement: Arrangement
    sources: Arrays  # arranged
    variables: Arrays
    micro: Any  # the batch, [micro-batches, ...]
    step: Any
    train: bool

    @property
    def table(self) -> PlacementTable:
        return self.objective.table

    @property
    def stages(self) -> int:
        return self.arrangement.stages

    def traced(self) -> tuple[Traced, LossParts]:
        """The loss of one micro-batch and its parts, as this context has them."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        rest = (jax.tree.map(_shape, self.variables), self._one, index, index)
        program = self.objective.trace(rest, self.train)
        if self.train and program.written:
            raise ModelError(
                "mesh.pipe: the training pass changes variables of the model (the statistics of a "
                "BatchNorm, say), and the stages work on several micro-batches at once; a "
                "normalisation without running statistics does, or mesh.pipe 1"
            )
        variables = dict(zip(self._paths, program.parameters, strict=True))
        leaves = self.arrangement.stack.leaves
        stack = {name: [variables[p] for p in paths] for name, paths in leaves.items()}
        return program, parts_of(program.closed, stack)

    @property
    def _paths(self) -> list[str]:
        return [row.path for row in self.table]

    @cached_property
    def _one(self) -> Any:
        """The shapes of one micro-batch, as the loss is given it."""

        def first(micro: Any) -> Any:
            return jax.tree.map(lambda x: self.objective.cast(x[0]), micro)

        return jax.eval_shape(first, jax.tree.map(_shape, self.micro))

    @cached_property
    def samples(self) -> int | None:
        """Of one micro-batch, where the ranks can share them evenly."""
        return self.objective.samples(self._one)

    # -- in the global view -----------------------------------------------------------------------

    @cached_property
    def _in_global_view(self) -> tuple[Traced, LossParts]:
        return self.traced()

    @property
    def program(self) -> Traced:
        return self._in_global_view[0]

    @property
    def parts(self) -> LossParts:
        return self._in_global_view[1]

    @cached_property
    def index(self) -> dict[Any, int]:
        """The place of each input of the parts."""
        return {v: i for i, v in enumerate(self.parts.inputs)}

    @cached_property
    def outside(self) -> dict[str, Any]:
        """The variables of the parameters that are no block's, by path."""
        variables = zip(self._paths, self.program.parameters, strict=True)
        return {path: v for path, v in variables if path not in self.arrangement.stack.paths}

    @cached_property
    def outer(self) -> Arrays:
        """The parameters that are no block's, as units are given them."""
        return {p: unpad(self.sources[p], self.table[p].source_shape) for p in self.outside}

    def inputs(self, micro: Any, outer: Mapping[str, Any]) -> Values:
        """The inputs of the parts for one micro-batch; where the blocks' would be, None."""
        batch = jax.tree.map(lambda x: self.objective.cast(at(x, micro)), self.micro)
        rest = jax.tree.leaves((self.variables, batch, jnp.asarray(self.step), micro))
        return [*self.parts.constants, *(outer.get(path) for path in self._paths), *rest]


def at(x: jax.Array, index: Any) -> jax.Array:
    """x[index] of a traced index."""
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def inexact(x: Any) -> bool:
    """Whether gradients flow through it."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
