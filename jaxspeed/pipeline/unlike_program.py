"""The program of unlike stages: each stage takes its branch, which contains no collective.

XLA's partitioner communicates inside of branches with devices that take another one, which
deadlocks (`tests/pipeline/test_unlike_stages.py`). So the data axes are manual too around the
branches: each data rank computes its own samples, and gradients are summed over the ranks outside.
The backward pass of a stage recomputes it within its branch: residuals that leave a branch would
take the room of all stages' residuals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.jaxpr.traverse import ClosedJaxpr
from jaxspeed.ops.free_axes import free_sample_axes, free_sample_shards
from jaxspeed.pipeline.packed_layout import PackedLayout
from jaxspeed.pipeline.stage_program import Stage
from jaxspeed.pipeline.stage_shard_map import sum_over
from jaxspeed.pipeline.step_values import SplitStep, Values, inexact
from jaxspeed.pipeline.unlike_stages import UnlikeParts
from jaxspeed.placement.rows import reduction_dtype
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.passes import PartContext, after_split
from jaxspeed.zero3 import EvalContext, Units, run_segmented

Branch = Callable[..., Values]


@dataclass(frozen=True)
class UnlikeStage(Stage):
    """The stages' packed weights, and the branches."""

    @property
    def names(self) -> list[str]:
        return list(self.split.layout.names())

    @cached_property
    def weights(self) -> Values:
        return [self.split.sources[name] for name in self.names]

    @property
    def returns_gradients(self) -> bool:
        return True

    def run(self, args: Values) -> Values:
        carried = len(self._parts.carry)
        return self._by_branch(lambda branch: branch, args, [True] * carried)

    def passes(self, active: Sequence[bool], args: Values) -> "BranchPasses":
        return BranchPasses(self, active)

    @property
    def _packed(self) -> PackedLayout:
        assert isinstance(self.split.layout, PackedLayout)
        return self.split.layout

    @property
    def _parts(self) -> UnlikeParts:
        assert isinstance(self.split.parts, UnlikeParts)
        return self.split.parts

    def backward(self, active: Sequence[bool], args: Values, cotangents: Values) -> Values:
        """The gradients of the active arguments."""
        count = len(args)

        def pulled(branch: Branch) -> Branch:
            def run(*arguments: Any) -> Values:
                args, cotangents = arguments[:count], arguments[count:]

                def forward(*moving: Any) -> Values:
                    values = iter(moving)
                    full = [next(values) if on else a for a, on in zip(args, active, strict=True)]
                    return [x for x in branch(*full) if inexact(x)]

                moving = [a for a, on in zip(args, active, strict=True) if on]
                return list(jax.vjp(forward, *moving)[1](list(cotangents)))

            return run

        sent = sum(map(inexact, self._parts.carry))
        results = [*[False] * (sum(active) - sent), *[True] * sent]
        return self._by_branch(pulled, [*args, *cotangents], results)

    def _by_branch(
        self,
        of_branch: Callable[[Branch], Branch],
        args: Values,
        results: Sequence[bool],
    ) -> Values:
        """Run `of_branch` of the stage's branch on each data rank's samples.

        Args:
          args: those of a chunk, then other messages.
          results: whether each result has samples; others are summed over the ranks.
        """
        parts = self._parts
        at = len(self.names) + len(parts.context_reads)  # the place of the stage's number
        axes, ranks = free_sample_axes(), free_sample_shards()
        count = parts.messages.lead
        split = self._of_samples(count // ranks)
        # One sample alone may be traced otherwise.
        other = count // ranks if count > ranks else 2 * count

        def local(*args: Any) -> Values:
            program, rank_parts = split.traced()
            _, alike = self.split.traced() if ranks > 1 else (None, rank_parts)
            assert isinstance(rank_parts, UnlikeParts) and isinstance(alike, UnlikeParts)
            if ranks > 1:
                _, twin = self._of_samples(other).traced()
                assert isinstance(alike, UnlikeParts) and isinstance(twin, UnlikeParts)
                alike.refuse_other_computation(twin, (count, other))
            rank_parts = rank_parts.of_samples(parts, ranks)
            stages = range(self.split.stages)
            branches = [of_branch(self._branch(program, rank_parts, stage)) for stage in stages]
            outputs = lax.switch(args[at], branches, *args)
            pairs = zip(outputs, results, strict=True)
            return [x if of_samples or not axes else self._sum(x, axes) for x, of_samples in pairs]

        if not axes:
            return local(*args)
        parts.refuse_mixed_samples()
        in_batch = [self._in_batch(i) for i in parts.context_reads]
        has_samples = [*[False] * len(self.names), *in_batch, False, *[True] * (len(args) - at - 1)]
        run = jax.shard_map(
            local,
            in_specs=tuple(P(axes) if of_samples else P() for of_samples in has_samples),
            out_specs=[P(axes) if of_samples else P() for of_samples in results],
            axis_names=set(axes),
            check_vma=False,
        )
        return list(run(*args))

    def _sum(self, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """A gradient, summed over the data ranks."""
        sent = reduction_dtype(grad.dtype, self.split.traced_loss.wire)
        return sum_over(grad.astype(sent), axes).astype(grad.dtype)

    def _in_batch(self, index: int) -> bool:
        """Whether an input of the loss is an array of samples."""
        v, batch = self.split.parts.inputs[index], self.split.program.batch
        return v in set(batch) and v.aval.shape[:1] == (self._parts.messages.lead,)

    def _branch(self, program: LossProgram, parts: UnlikeParts, stage: int) -> Branch:
        """The function of a stage; `program` and `parts` are those of a data rank's samples."""
        layout, names, table = self._packed, self.names, self.split.table
        count, reads = len(names), len(parts.context_reads)
        jaxpr = parts.branches[stage]
        read = {*jaxpr.invars}
        params = {path: v for path, v in program.parameters.items() if v in read}
        before = parts.messages.sent[stage - 1] if stage else []
        samples = [v for v in (*program.batch, *before) if v in read]
        specs = {path: table[path].read.spec for path in params}
        traced_loss = self.split.traced_loss
        at = PartContext(table.mesh, specs, traced_loss.style, None, sequence=traced_loss.sequence)
        part = after_split(program.part(ClosedJaxpr(jaxpr, ()), params, samples), at)
        no_units = EvalContext(Units())

        def evaluate(args: Sequence[Any]) -> Values:
            return run_segmented(part.closed.jaxpr, (), args, {}, no_units)

        def run(*args: Any) -> Values:
            weights = dict(zip(names, args[:count], strict=True))
            context, carry = args[count : count + reads], args[count + reads + 1 :]
            operands = layout.of_stage(stage, weights), context, carry
            return parts.branch(stage, evaluate, *operands)

        return run

    def _of_samples(self, count: int) -> SplitStep:
        """The split loss of micro-batches of so many samples."""
        lead = self._parts.messages.lead

        def sized(x: Any) -> jax.ShapeDtypeStruct:  # [micro-batches, samples, ...]
            shape = (
                (x.shape[0], x.shape[1] * count // lead, *x.shape[2:]) if x.ndim > 1 else x.shape
            )
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return replace(self.split, micro=jax.tree.map(sized, self.split.micro))


@dataclass(frozen=True)
class BranchPasses:
    """Forward and backward of a stage, as `Passes` has them; the arguments are its residuals."""

    stage: UnlikeStage
    active: Sequence[bool]

    def forward(self, args: Values) -> tuple[Values, Values]:
        return self.stage.run(args), args[len(self.stage.names) :]

    def backward(self, weights: Values, saved: Values, cotangents: Values) -> Values:
        return self.stage.backward(self.active, [*weights, *saved], cotangents)
