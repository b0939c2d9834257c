"""`SplitStep`: the parts of a split loss, with the values of one step.

The loss is traced for each context: inside a stage, where `pipe` is manual, kernels and constraints
see another mesh than in the global view.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.slicing import read_by
from jaxspeed.jaxpr.traverse import Jaxpr
from jaxspeed.ops.free_axes import free_sample_shards
from jaxspeed.pipeline.packed_layout import PackedLayout
from jaxspeed.pipeline.split_loss import LossParts, split_loss
from jaxspeed.pipeline.stage_layout import StageLayout
from jaxspeed.pipeline.unlike_stages import UnlikeParts, split_unlike
from jaxspeed.placement.paths import listed
from jaxspeed.placement.stacks import Stack, UnlikeStages
from jaxspeed.placement.table import PlacementTable
from jaxspeed.traced_loss.loss import TermWeights
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train_state.state import Arrays

Values = list[Any]


@dataclass(frozen=True)
class SplitStep:
    """The parts of a loss and their inputs in one step."""

    traced_loss: MicroBatchLoss
    layout: StageLayout | PackedLayout
    sources: Arrays  # in the stage layout
    variables: Arrays
    micro: Any  # the batch, [micro-batches, ...]
    step: Any
    train: bool

    @property
    def table(self) -> PlacementTable:
        return self.traced_loss.table

    @property
    def stages(self) -> int:
        return self.layout.stages

    def traced(self) -> tuple[LossProgram, LossParts | UnlikeParts]:
        """The loss of one micro-batch and its parts, traced in this context."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        rest = (jax.tree.map(_shape, self.variables), self._one, index, index)
        program = self.traced_loss.trace(rest, self.train)
        try:
            parts = split_program(program, self.layout.stack, self._one)
        except ModelError as error:
            if not program.written:
                raise
            jaxpr = program.closed.jaxpr
            of_loss = len(jaxpr.outvars) - len(program.written)
            alone = program.rewritten(jaxpr.replace(outvars=jaxpr.outvars[:of_loss]))
            split_program(alone, self.layout.stack, self._one)  # or what else is wrong
            raise _changed_by_blocks(program.written) from error
        if program.written:
            _refuse_reads_before_writes(program, parts)
        return program, parts

    @cached_property
    def mean_weights(self) -> TermWeights | None:
        """The mean weights of the micro-batches, if the loss has several terms."""
        return self.traced_loss.mean_weights(self.variables, self.micro, self.step, self.train)

    @cached_property
    def _one(self) -> Any:
        """The shapes of one micro-batch as the loss reads it."""

        def first(micro: Any) -> Any:
            return self.traced_loss.cast(jax.tree.map(lambda x: x[0], micro))

        return jax.eval_shape(first, jax.tree.map(_shape, self.micro))

    @cached_property
    def samples(self) -> int | None:
        """The samples of one micro-batch, if the ranks divide them."""
        return self.traced_loss.samples(self._one)

    def is_sum_of_parts(self, parts: int) -> bool:
        """Whether a micro-batch can be computed as several, without drawing other numbers."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        rest = (jax.tree.map(_shape, self.variables), self._one, index, index)
        separable = self.traced_loss.by_parts(rest, self.train, parts)
        return not separable.not_once and not self.program.draws_random_numbers

    # -- in the global view -----------------------------------------------------------------------

    @cached_property
    def _in_global_view(self) -> tuple[LossProgram, LossParts | UnlikeParts]:
        return self.traced()

    @property
    def program(self) -> LossProgram:
        return self._in_global_view[0]

    @property
    def parts(self) -> LossParts | UnlikeParts:
        return self._in_global_view[1]

    @cached_property
    def index(self) -> dict[Any, int]:
        """The index of each input of the parts."""
        return {v: i for i, v in enumerate(self.parts.inputs)}

    @cached_property
    def outside(self) -> dict[str, Any]:
        """The variables of the parameters outside of the blocks, by path."""
        variables = self.program.parameters
        stack = self.layout.stack
        inside = stack.leaves.keys() | stack.paths
        return {path: v for path, v in variables.items() if path not in inside}

    def trained_inputs(self, jaxpr: Jaxpr) -> list[str]:
        """The trained parameters outside of the blocks that `jaxpr` reads."""
        read = read_by(jaxpr)
        paths = [path for path, v in self.outside.items() if v in read]
        return [path for path in paths if self.table[path].leaf.trainable]

    @cached_property
    def outer(self) -> Arrays:
        """The parameters outside of the blocks, unpadded as units read them."""
        rows = {path: self.table[path] for path in self.outside}
        return {path: self.traced_loss.given(row, self.sources[path]) for path, row in rows.items()}

    @cached_property
    def written(self) -> Arrays:
        """The variables that the loss changes after the blocks, before the first micro-batch."""
        return {path: self.variables[path] for path in sorted(self.program.written)}

    def inputs(
        self, micro: Any, outer: Mapping[str, Any], written: Mapping[str, Any] | None = None
    ) -> Values:
        """The inputs of the parts for one micro-batch; None for the blocks' parameters.

        `written` are variables after the micro-batches before it.
        """
        batch = self.traced_loss.cast(jax.tree.map(lambda x: at(x, micro), self.micro))
        variables = {**self.variables, **(written or {})}
        rest = jax.tree.leaves((variables, batch, jnp.asarray(self.step), micro))
        return [
            *self.parts.constants,
            *(outer.get(path) for path in self.program.parameters),
            *rest,
        ]


def _changed_by_blocks(written: Collection[str]) -> ModelError:
    return ModelError(
        "mesh.pipe: the training pass changes variables of the model (such as the running "
        f"statistics of a BatchNorm) in the blocks, or before them: {listed(sorted(written))}. The "
        "stages work on several micro-batches at once; use a normalization without running "
        "statistics, change them after the last block, from what the blocks pass on, or write "
        "mesh.pipe 1"
    )


def _refuse_reads_before_writes(program: LossProgram, parts: LossParts | UnlikeParts) -> None:
    """Raise ModelError unless all that the loss changes is read after the last block alone."""
    early = read_by(parts.before) | {parts.inputs[i] for i in parts.context_reads}
    known = {path: v for v, path in program.variables.items()}
    changed = [path for path in program.written if path not in known or known[path] in early]
    if changed:
        raise _changed_by_blocks(changed)


def split_program(program: LossProgram, stack: Stack, micro_batch: Any) -> LossParts | UnlikeParts:
    """The parts of a traced loss.

    Args:
      stack: the blocks that become stages.
      micro_batch: its shapes.
    """
    if isinstance(stack, UnlikeStages):
        parameters = {v: path for path, v in program.parameters.items()}
        return split_unlike(program.closed, parameters, stack, _lead(micro_batch), program.batch)
    paths = {name: (name,) if stack.divided else members for name, members in stack.leaves.items()}
    leaves = {name: [program.parameters[p] for p in members] for name, members in paths.items()}
    return split_loss(program.closed, leaves)


def _lead(micro_batch: Any) -> int:
    """The first dim of messages between unlike stages: the samples if data ranks shard them."""
    if free_sample_shards() == 1:
        return 1
    sizes = {x.shape[0] for x in jax.tree.leaves(micro_batch) if x.shape}
    if len(sizes) == 1:
        return int(sizes.pop())
    raise ModelError(
        "mesh.pipe: with unlike stages and data ranks, the arrays of a batch need one first dim, "
        f"the samples, and they have {', '.join(map(str, sorted(sizes)))}; set mesh.data and "
        "mesh.replica to 1, or pass what has no samples as train_batch(batch, extra=...)"
    )


def at(x: jax.Array, index: Any) -> jax.Array:
    """x[index] for a traced index."""
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def inexact(x: Any) -> bool:
    """Whether gradients flow through `x`: a floating or complex dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
