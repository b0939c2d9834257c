"""Pipelined gradients of a step's micro-batches: forward and backward, tick by tick.

Each stage saves the input of a chunk until its backward tick and recomputes the chunk there; or it
saves the residuals instead (`saves`). Gradients are accumulated in units of the first micro-batch's
weight, so that neither many micro-batches nor large weights leave the range of a 16-bit
accumulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.pipeline import stage_shard_map
from jaxspeed.pipeline.cpu_ordering import (
    all_ordered_after,
    entering,
    gathers_ordered_after,
    ordered_after,
)
from jaxspeed.pipeline.embed_and_head import embed, head_and_loss
from jaxspeed.pipeline.evaluation import no_loss
from jaxspeed.pipeline.schedule import Schedule
from jaxspeed.pipeline.stage_program import Stage, in_context
from jaxspeed.pipeline.stage_shard_map import (
    broadcast_from,
    on_stages,
    read_slot,
    send_to_stage,
    write_slot,
)
from jaxspeed.pipeline.step_values import SplitStep, Values, inexact
from jaxspeed.pipeline.tick_loops import Phase, StageWork, Tick, run_ticks
from jaxspeed.placement.codec import pad
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.remat.host_share import joined, split
from jaxspeed.traced_loss.accumulate import Sums, accumulate, per_weight, unit_of
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.train_state.state import Arrays


class TickState(NamedTuple):
    """The carry of the loop over ticks."""

    saved: Values  # inputs or residuals saved by the stages, [stages, slots, ...]
    ahead: Values  # messages to the next stage, [stages, ...]
    back: Values  # gradients to the stage before, [stages, ...]
    blocks: Values  # gradients of the blocks' parameters, [stages, chunks, layers, ...]
    shared: Values  # of parameters that every block reads, each stage's partial sum, [stages, ...]
    outer: Arrays  # of parameters outside of the blocks
    loss: Loss
    written: Arrays  # variables that the loss changes, after the finished micro-batches
    weights: jax.Array  # of each finished micro-batch, [micro-batches]
    unit: jax.Array  # weight in whose units gradients are counted; 0 before the first


@dataclass
class Training:
    """Computation of one step's gradients."""

    split: SplitStep
    stage: Stage
    saves: bool
    scale: Any  # of the loss
    host_ratio: float = 0.0  # share of each input saved between ticks that is offloaded
    passes: Any = None  # forward and backward of a chunk
    parts: Any = None  # tree of what is saved: the parts of each array

    def run(self, schedule: Schedule) -> tuple[Sums, Arrays]:
        """The sums of all micro-batches, and the variables that the loss changed."""
        state = run_ticks(schedule, self._tick, self._start(schedule))
        grads = {**state.outer, **dict(zip(self._accumulated, state.blocks, strict=True))}
        for path, grad in zip(self.stage.shared.values(), state.shared, strict=True):
            grads[path] = grads[path] + self._place(path, grad.sum(0))
        weight = state.loss.weight
        factor = per_weight(state.unit, weight)
        grads = {path: g * factor.astype(g.dtype) for path, g in grads.items()}
        return Sums(grads, state.loss.total, weight, state.loss.metrics), state.written

    @property
    def _trained(self) -> list[str]:
        """What the stages read of the blocks' parameters that has gradients."""
        return [name for name in self.stage.names if self.split.layout.trained(name)]

    @property
    def _accumulated(self) -> dict[str, list[str]]:
        """The same by the arrays that accumulate the gradients."""
        read, pieces = set(self._trained), self.split.layout.gradient_pieces
        trained = {
            name: [piece for piece in names if piece in read] for name, names in pieces.items()
        }
        return {name: names for name, names in trained.items() if names}

    # -- before the first tick --------------------------------------------------------------------

    def _start(self, schedule: Schedule) -> TickState:
        split, loss = self.split, no_loss(self.split)
        trained = [p for p in split.outside if split.table[p].leaf.trainable]
        zeros = {p: jnp.zeros(split.outer[p].shape, split.outer[p].dtype) for p in trained}
        ahead = all_ordered_after(split, self.stage.messages(), self.stage.weights, split.step)
        return TickState(
            self._slots(schedule.slots),
            ahead,
            [x for x in self.stage.messages() if inexact(x)],
            [self._zero_gradient(name) for name in self._accumulated],
            [self._zero_shared_gradient(path) for path in self.stage.shared.values()],
            {path: self._place(path, zero) for path, zero in zeros.items()},
            loss,
            split.written,
            jnp.zeros((schedule.micro_batches,), loss.weight.dtype),
            jnp.zeros((), loss.weight.dtype),
        )

    def _zero_gradient(self, name: str) -> jax.Array:
        layout = self.split.layout
        shape, dtype, spec = layout.accumulator(name)
        zero = jnp.zeros((layout.stages, layout.chunks, *shape), dtype)
        return constrain(zero, in_context(PartitionSpec(PIPE, None, *spec)), "pipeline.gradients")

    def _zero_shared_gradient(self, path: str) -> jax.Array:
        grad = self.split.table[path].grad
        assert grad is not None
        return jnp.zeros((self.split.stages, *self.split.outer[path].shape), grad.dtype)

    def _slots(self, slots: int) -> Values:
        """Blank buffers for what a stage saves of the micro-batches in flight."""
        shapes = self._saved_shapes()
        blank = stage_shard_map.blank
        parts = jax.eval_shape(lambda: [self._split(blank(x.shape[1:], x.dtype)) for x in shapes])
        self.parts = jax.tree.structure(parts)
        buffers: Values = []
        for x, of in zip(shapes, parts, strict=True):
            # Of two parts the first is offloaded.
            first, *rest = (
                blank((x.shape[0], slots, *part.shape), x.dtype) for part in jax.tree.leaves(of)
            )
            on_host = self.host_ratio and inexact(first)
            buffers += [jax.device_put(first, jax.memory.Space.Host) if on_host else first, *rest]
        return buffers

    def _split(self, x: Any) -> Any:
        divided = 0 < self.host_ratio < 1 and inexact(x) and x.ndim > 1
        return split(x, self.host_ratio) if divided else x

    def _saved_shapes(self) -> Sequence[Any]:
        stages = self.split.stages
        if not self.saves:
            return self.stage.messages()

        def residual_arrays() -> Any:
            none = StageWork(*jnp.zeros((3, stages), jnp.int32))

            def stage_body(number: Any, stage_row: Any, context: Any) -> Any:
                work, weights, x = stage_row
                return self._forward(self.stage.arguments(number, work, weights, context, x)), ()

            per_stage = (none, self.stage.weights, self.stage.messages())
            return on_stages(stage_body, stages, per_stage, self.stage.context)[0]

        return [x for values in jax.eval_shape(residual_arrays) for x in values]

    # -- one tick ---------------------------------------------------------------------------------

    def _tick(self, phase: Phase, state: TickState, row: Tick) -> TickState:
        if phase.forward:
            state = self._forward_tick(state, row)
        if phase.backward:
            state = self._backward_tick(phase, state, row)
        return state

    def _forward_tick(self, state: TickState, row: Tick) -> TickState:
        """Each stage runs a chunk on its message, saves the input, and sends the output on."""
        stage, stages = self.stage, self.split.stages
        number, outer = entering(self.split, row.entering, state.ahead)
        entry = embed(self.split, number, outer)

        def stage_body(number: Any, stage_row: Any, every: Any) -> Any:
            work, weights, saved, ahead = stage_row
            entry, context = every
            x = stage.entered(number, work, entry, ahead)
            args = stage.arguments(number, work, weights, context, x)
            if self.saves:
                y, residuals = self._forward(args)
                x = [*y, *residuals]
            else:
                y = stage.run(args)
            parts = jax.tree.leaves([self._split(value) for value in x])
            saved = write_slot(saved, work.slot, parts, work.micro >= 0)
            return (saved, send_to_stage(y, stages, 1)), ()

        per_stage = (row.forward, stage.weights, state.saved, state.ahead)
        (saved, ahead), _ = on_stages(stage_body, stages, per_stage, (entry, stage.context))
        return state._replace(saved=saved, ahead=ahead)

    def _forward(self, args: Values) -> tuple[Values, Values]:
        """A chunk's outputs, and its residuals that are not weights."""
        active = self.stage.active(self._trained)
        if not any(active):
            return self.stage.run(args), []
        self.passes = self.stage.passes(active, args)
        return self.passes.forward(jax.tree.leaves(args))

    def _backward_tick(self, phase: Phase, state: TickState, row: Tick) -> TickState:
        """Each stage runs a chunk's backward on the gradient that it received."""
        stage, stages, carried = self.stage, self.split.stages, len(self.split.parts.carry)

        def recompute(number: Any, stage_row: Any, context: Any) -> Any:
            work, weights, saved, ahead = stage_row
            x = [joined(x) for x in jax.tree.unflatten(self.parts, read_slot(saved, work.slot))]
            if self.saves:
                y, residuals = x[:carried], x[carried:]
            else:
                x = ordered_after(self.split, x, ahead, work.micro)
                y, residuals = self._forward(stage.arguments(number, work, weights, context, x))
            return residuals, broadcast_from(y, number == stages - 1) if phase.head else []

        to_read = (row.backward, stage.weights, state.saved, state.ahead)
        residuals, end = on_stages(recompute, stages, to_read, stage.context)
        start: Values = [jnp.zeros(x.shape[1:], x.dtype) for x in state.back]
        if phase.head:
            state, start = self._head_backward(state, row.leaving, end)
        if not any(stage.active(self._trained)):  # only what follows the blocks is trained
            return state

        def stage_body(number: Any, stage_row: Any, every: Any) -> Any:
            work, weights, residuals, ahead, back, blocks, shared = stage_row
            start, share = every
            ends = stage.ends(number, work)
            cotangents = [jnp.where(ends, a, b) for a, b in zip(start, back, strict=True)]
            received = [x for x in ahead if inexact(x)]
            cotangents = ordered_after(self.split, cotangents, received, work.micro)
            chunk_weights = jax.tree.leaves(stage.chunk(weights, work))
            grads = iter(self.passes.backward(chunk_weights, residuals, cotangents))
            factor = share[jnp.maximum(work.micro, 0)]
            of_blocks = {name: on_device(next(grads)) for name in self._trained}
            blocks = [
                self._add_to_chunk(
                    name, total, [of_blocks[piece] for piece in pieces], number, work, factor
                )
                for (name, pieces), total in zip(self._accumulated.items(), blocks, strict=True)
            ]
            shared = [_add(total, next(grads), factor, work.micro >= 0) for total in shared]
            dx = list(grads) or [jnp.zeros(x.shape, x.dtype) for x in back]
            returned = broadcast_from(dx, (number == 0) & (work.chunk == 0))
            return (send_to_stage(dx, stages, -1), blocks, shared), returned

        share = state.weights / jnp.where(state.unit > 0, state.unit, 1)
        messages = (state.ahead, state.back)
        per_stage = (row.backward, stage.weights, residuals, *messages, state.blocks, state.shared)
        (back, blocks, shared), returned = on_stages(stage_body, stages, per_stage, (start, share))
        state = state._replace(back=back, blocks=blocks, shared=shared)
        return self._embedding_backward(state, row.returning, returned, share)

    def _add_to_chunk(
        self, name: str, total: Any, grads: Values, number: Any, work: StageWork, factor: Any
    ) -> jax.Array:
        """Add a chunk's gradients of a parameter to those of the stage, [chunks, layers, ...]."""
        layout, busy = self.split.layout, work.micro >= 0
        grad, real = layout.accumulated(name, grads, number, work.chunk)
        grad = pad(grad.astype(total.dtype), total.shape[1:])
        spec = layout.accumulator(name)[2]
        grad = constrain(grad, in_context(spec), "pipeline.accumulate")
        old = jax.lax.dynamic_index_in_dim(total, work.chunk, 0, False)
        return jax.lax.dynamic_update_index_in_dim(
            total, _add(old, grad, factor, busy & real), work.chunk, 0
        )

    # -- embedding and head -----------------------------------------------------------------------

    def _head_backward(self, state: TickState, micro: Any, end: Values) -> tuple[TickState, Values]:
        """Head and loss of the leaving micro-batch, their gradients, and those of `end`."""
        split = self.split
        outer = gathers_ordered_after(split, [x for x in end if inexact(x)], micro)
        moving = [i for i, x in enumerate(end) if inexact(x)]

        def scaled(active: Arrays, carry: Values) -> tuple[jax.Array, tuple[Loss, Arrays]]:
            outputs = list(end)
            for i, x in zip(moving, carry, strict=True):
                outputs[i] = x
            arrays = {**outer, **active}
            loss, written = head_and_loss(split, micro, arrays, outputs, state.written)
            share = self.scale / unit_of(loss.weight)
            return loss.total * share.astype(loss.total.dtype), (loss, written)

        active = {path: outer[path] for path in split.trained_inputs(split.parts.after)}
        differentiate = jax.grad(scaled, argnums=(0, 1), has_aux=True)
        (grads, start), (loss, written) = differentiate(active, [end[i] for i in moving])
        start = all_ordered_after(split, start, grads, micro)
        weight = unit_of(loss.weight)
        unit = jnp.where(state.unit > 0, state.unit, weight * len(state.weights))
        state = state._replace(
            outer=state.outer | self._add_outer(state.outer, grads, weight / unit, True),
            loss=accumulate(state.loss, loss)[0],
            written=written,
            weights=state.weights.at[micro].set(weight),
            unit=unit,
        )
        return state, start

    def _embedding_backward(
        self, state: TickState, micro: Any, returned: Values, share: Any
    ) -> TickState:
        """The embedding's gradients, of the micro-batch whose backward reached it."""
        split = self.split
        outer = gathers_ordered_after(split, returned, micro)
        paths = split.trained_inputs(split.parts.before)
        if not paths:
            return state
        (number,) = all_ordered_after(split, [jnp.maximum(micro, 0)], returned, micro)

        def entry(active: Arrays) -> Values:
            return [x for x in embed(split, number, {**outer, **active}) if inexact(x)]

        _, pull = jax.vjp(entry, {path: outer[path] for path in paths})
        (grads,) = pull(returned)
        more = self._add_outer(state.outer, grads, share[number], micro >= 0)
        return state._replace(outer=state.outer | more)

    def _add_outer(self, totals: Arrays, grads: Arrays, factor: Any, busy: Any) -> Arrays:
        """Add gradients of parameters outside of the blocks, in their placement."""
        return {
            path: self._place(path, _add(totals[path], self._place(path, grad), factor, busy))
            for path, grad in grads.items()
        }

    def _place(self, path: str, grad: jax.Array) -> jax.Array:
        row = self.split.table[path]
        assert row.grad is not None
        grad = pad(on_device(grad).astype(row.grad.dtype), row.shape(row.grad))
        return constrain(grad, self.split.table.sharding(row.grad), "pipeline.outer")


def _add(total: jax.Array, grad: jax.Array, factor: Any, busy: Any) -> jax.Array:
    """Add grad * factor where `busy`: selected, not multiplied by a mask, for it may be NaN."""
    wide = jnp.promote_types(total.dtype, factor.dtype)
    more = total.astype(wide) + grad.astype(wide) * factor.astype(wide)
    return jnp.where(busy, more.astype(total.dtype), total)
