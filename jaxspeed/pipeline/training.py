"""Gradients of a step's micro-batches over the stages: forward and backward, tick by tick.

Each stage keeps the input of a chunk until its backward tick, and runs the chunk again there; or it
keeps what the derivative needs instead (`saves`). Gradients add up as they are made, in units of
what the first micro-batch weighs, so that neither many micro-batches nor large weights leave the
range of a 16-bit accumulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspeed.objective.accumulate import Sums, accumulate, per_weight
from jaxspeed.objective.loss import Loss
from jaxspeed.objective.train_state import Arrays, pad
from jaxspeed.pipeline import stage_shard_map
from jaxspeed.pipeline.cpu_ordering import entering, gathered_once_there, once_all_there, once_there
from jaxspeed.pipeline.embed_and_head import after, before, read_in
from jaxspeed.pipeline.evaluation import no_loss
from jaxspeed.pipeline.schedule import Schedule
from jaxspeed.pipeline.stage_program import Stage, in_context
from jaxspeed.pipeline.stage_shard_map import (
    PIPE,
    from_one,
    hand_on,
    on_stages,
    read_slot,
    write_slot,
)
from jaxspeed.pipeline.step_values import Split, Values, inexact
from jaxspeed.pipeline.tick_loops import Now, Phase, Tick, follow
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.zero3.segment_vjp import Passes


class Flow(NamedTuple):
    """What goes on from tick to tick."""

    saved: Values  # what stages keep, [stages, slots, ...]
    ahead: Values  # messages to the next stage, [stages, ...]
    back: Values  # gradients to the stage before, [stages, ...]
    blocks: Values  # gradients of the blocks' parameters, [stages, chunks, layers, ...]
    shared: Values  # of what every block reads, each stage's part, [stages, ...]
    outer: Arrays  # of what is no block's
    loss: Loss
    weights: jax.Array  # of each micro-batch that has left, [micro-batches]
    unit: jax.Array  # in which gradients are counted; 0 before the first one


@dataclass
class Training:
    """One step's gradients."""

    split: Split
    stage: Stage
    saves: bool
    scale: Any  # of the loss
    placed: bool  # gradients are kept as the table says, not as a data rank's part of a sum
    on_host: bool = False  # what stages keep of each micro-batch waits in host memory
    passes: Any = None  # forward and backward of a chunk

    def run(self, schedule: Schedule) -> Sums:
        flow = follow(schedule, self._tick, self._start(schedule))
        grads = {**flow.outer, **dict(zip(self._trained, flow.blocks, strict=True))}
        for path, grad in zip(self.stage.shared.values(), flow.shared, strict=True):
            grads[path] = grads[path] + self._place(path, grad.sum(0))
        weight = flow.loss.weight
        factor = per_weight(flow.unit, weight)
        grads = {path: g * factor.astype(g.dtype) for path, g in grads.items()}
        return Sums(grads, flow.loss.total, weight, flow.loss.metrics)

    @property
    def _trained(self) -> list[str]:
        """The parameters of the blocks that have gradients."""
        row = self.split.arrangement.row
        return [name for name in self.stage.names if row(name).leaf.trainable]

    # -- before the first tick --------------------------------------------------------------------

    def _start(self, schedule: Schedule) -> Flow:
        split, loss = self.split, no_loss(self.split)
        trained = [p for p in split.outside if split.table[p].leaf.trainable]
        zeros = {p: jnp.zeros(split.outer[p].shape, split.outer[p].dtype) for p in trained}
        ahead = once_all_there(split, self.stage.messages(), self.stage.weights, split.step)
        return Flow(
            self._slots(schedule.slots),
            ahead,
            [x for x in self.stage.messages() if inexact(x)],
            [self._no_gradient(name) for name in self._trained],
            [self._no_part(path) for path in self.stage.shared.values()],
            {path: self._place(path, zero) for path, zero in zeros.items()},
            loss,
            jnp.zeros((schedule.micro_batches,), loss.weight.dtype),
            jnp.zeros((), loss.weight.dtype),
        )

    def _no_gradient(self, name: str) -> jax.Array:
        own = self.split.arrangement
        grad = own.row(name).grad
        assert grad is not None
        shape = (own.stages, own.chunks, own.rows, *own.gradient_shape(name))
        zero = jnp.zeros(shape, grad.dtype)
        if not self.placed:
            return zero
        spec = PartitionSpec(PIPE, None, None, *own.spec(name, grad))
        return constrain(zero, in_context(spec), "pipeline.gradients")

    def _no_part(self, path: str) -> jax.Array:
        grad = self.split.table[path].grad
        assert grad is not None
        return jnp.zeros((self.split.stages, *self.split.outer[path].shape), grad.dtype)

    def _slots(self, slots: int) -> Values:
        """Room for what a stage keeps of each micro-batch under way."""
        blank = [
            stage_shard_map.blank((x.shape[0], slots, *x.shape[1:]), x.dtype)
            for x in self._kept_shapes()
        ]
        if not self.on_host:
            return blank
        return [jax.device_put(x, jax.memory.Space.Host) if inexact(x) else x for x in blank]

    def _kept_shapes(self) -> Sequence[Any]:
        stages = self.split.stages
        if not self.saves:
            return self.stage.messages()

        def kept() -> Any:
            none = Now(*jnp.zeros((3, stages), jnp.int32))

            def lane(number: Any, own: Any, context: Any) -> Any:
                now, weights, x = own
                return self._forward(self.stage.arguments(number, now, weights, context, x)), ()

            own = (none, self.stage.weights, self.stage.messages())
            return on_stages(lane, stages, own, self.stage.context)[0]

        return [x for values in jax.eval_shape(kept) for x in values]

    # -- one tick ---------------------------------------------------------------------------------

    def _tick(self, phase: Phase, flow: Flow, row: Tick) -> Flow:
        if phase.forward:
            flow = self._go_forward(flow, row)
        if phase.backward:
            flow = self._go_back(phase, flow, row)
        return flow

    def _go_forward(self, flow: Flow, row: Tick) -> Flow:
        """Each stage runs a chunk on what it was handed, keeps that, and hands the result on."""
        stage, stages = self.stage, self.split.stages
        number, outer = entering(self.split, row.entering, flow.ahead)
        entry = before(self.split, number, outer)

        def lane(number: Any, own: Any, every: Any) -> Any:
            now, weights, saved, ahead = own
            entry, context = every
            x = stage.entered(number, now, entry, ahead)
            args = stage.arguments(number, now, weights, context, x)
            if self.saves:
                y, kept = self._forward(args)
                x = [*y, *kept]
            else:
                y = stage.run(args)
            saved = write_slot(saved, now.slot, x, now.micro >= 0)
            return (saved, hand_on(y, stages, 1)), ()

        own = (row.forward, stage.weights, flow.saved, flow.ahead)
        (saved, ahead), _ = on_stages(lane, stages, own, (entry, stage.context))
        return flow._replace(saved=saved, ahead=ahead)

    def _forward(self, args: Values) -> tuple[Values, Values]:
        """What a chunk gives, and what its derivative needs that no weight tells."""
        active = self.stage.active(self._trained)
        self.passes = Passes(
            lambda *args: self.stage.run(list(args)), active, args, len(self.stage.names)
        )
        return self.passes.forward(args)

    def _go_back(self, phase: Phase, flow: Flow, row: Tick) -> Flow:
        """Each stage takes a chunk back, with the gradient that it was handed."""
        stage, stages, carried = self.stage, self.split.stages, len(self.split.parts.carry)

        def again(number: Any, own: Any, context: Any) -> Any:
            now, weights, saved, ahead = own
            x = read_slot(saved, now.slot)
            if self.saves:
                y, kept = x[:carried], x[carried:]
            else:
                x = once_there(self.split, x, ahead, now.micro)
                y, kept = self._forward(stage.arguments(number, now, weights, context, x))
            return kept, from_one(y, number == stages - 1) if phase.head else []

        to_read = (row.backward, stage.weights, flow.saved, flow.ahead)
        kept, end = on_stages(again, stages, to_read, stage.context)
        start: Values = [jnp.zeros(x.shape[1:], x.dtype) for x in flow.back]
        if phase.head:
            flow, start = self._leave(flow, row.leaving, end)

        def lane(number: Any, own: Any, every: Any) -> Any:
            now, weights, kept, ahead, back, blocks, shared = own
            start, share = every
            ends = stage.ends(number, now)
            cotangents = [jnp.where(ends, a, b) for a, b in zip(start, back, strict=True)]
            handed = [x for x in ahead if inexact(x)]
            cotangents = once_there(self.split, cotangents, handed, now.micro)
            grads = iter(self.passes.backward(stage.chunk(weights, now), kept, cotangents))
            factor = share[jnp.maximum(now.micro, 0)]
            blocks = [
                self._added(name, total, next(grads), number, now, factor)
                for name, total in zip(self._trained, blocks, strict=True)
            ]
            shared = [_add(total, next(grads), factor, now.micro >= 0) for total in shared]
            dx = list(grads)
            returned = from_one(dx, (number == 0) & (now.chunk == 0))
            return (hand_on(dx, stages, -1), blocks, shared), returned

        share = flow.weights / jnp.where(flow.unit > 0, flow.unit, 1)
        messages = (flow.ahead, flow.back)
        own = (row.backward, stage.weights, kept, *messages, flow.blocks, flow.shared)
        (back, blocks, shared), returned = on_stages(lane, stages, own, (start, share))
        flow = flow._replace(back=back, blocks=blocks, shared=shared)
        return self._return(flow, row.returning, returned, share)

    def _added(
        self, name: str, total: Any, grad: Any, number: Any, now: Now, factor: Any
    ) -> jax.Array:
        """A chunk's gradient added to those of the stage [chunks, layers, ...]."""
        own = self.split.arrangement
        placement, busy = own.row(name).grad, now.micro >= 0
        assert placement is not None
        grad = on_device(grad)
        grad = pad(grad.astype(total.dtype), total.shape[1:])
        if self.placed:
            spec = PartitionSpec(None, *own.spec(name, placement))
            grad = constrain(grad, in_context(spec), "pipeline.accumulate")
        if own.padded:
            real = self.stage.first_layer(number, now) + jnp.arange(own.rows) < own.layers
            busy = busy & real.reshape(-1, *[1] * (grad.ndim - 1))
        old = jax.lax.dynamic_index_in_dim(total, now.chunk, 0, False)
        return jax.lax.dynamic_update_index_in_dim(
            total, _add(old, grad, factor, busy), now.chunk, 0
        )

    # -- embedding and head -----------------------------------------------------------------------

    def _leave(self, flow: Flow, micro: Any, end: Values) -> tuple[Flow, Values]:
        """Head and loss of the micro-batch that leaves: its gradients, and those to go back."""
        split = self.split
        outer = gathered_once_there(split, [x for x in end if inexact(x)], micro)
        moving = [i for i, x in enumerate(end) if inexact(x)]

        def scaled(active: Arrays, carry: Values) -> tuple[jax.Array, Loss]:
            whole = list(end)
            for i, x in zip(moving, carry, strict=True):
                whole[i] = x
            loss = after(split, micro, {**outer, **active}, whole)
            share = per_weight(self.scale, loss.weight)
            return loss.total * share.astype(loss.total.dtype), loss

        active = {path: outer[path] for path in read_in(split, split.parts.after)}
        differentiate = jax.grad(scaled, argnums=(0, 1), has_aux=True)
        (grads, start), loss = differentiate(active, [end[i] for i in moving])
        start = once_all_there(split, start, grads, micro)
        first = jnp.where(loss.weight > 0, loss.weight, 1) * len(flow.weights)
        unit = jnp.where(flow.unit > 0, flow.unit, first)
        flow = flow._replace(
            outer=flow.outer | self._more(flow.outer, grads, loss.weight / unit, True),
            loss=accumulate(flow.loss, loss)[0],
            weights=flow.weights.at[micro].set(loss.weight),
            unit=unit,
        )
        return flow, start

    def _return(self, flow: Flow, micro: Any, returned: Values, share: Any) -> Flow:
        """The gradients of what comes before the blocks, of the micro-batch that came back."""
        split = self.split
        outer = gathered_once_there(split, returned, micro)
        paths = read_in(split, split.parts.before)
        if not paths:
            return flow
        (number,) = once_all_there(split, [jnp.maximum(micro, 0)], returned, micro)

        def entry(active: Arrays) -> Values:
            return [x for x in before(split, number, {**outer, **active}) if inexact(x)]

        _, pull = jax.vjp(entry, {path: outer[path] for path in paths})
        (grads,) = pull(returned)
        more = self._more(flow.outer, grads, share[number], micro >= 0)
        return flow._replace(outer=flow.outer | more)

    def _more(self, totals: Arrays, grads: Arrays, factor: Any, busy: Any) -> Arrays:
        """Gradients of what is no block's, added up in their own placement."""
        return {
            path: self._place(path, _add(totals[path], self._place(path, grad), factor, busy))
            for path, grad in grads.items()
        }

    def _place(self, path: str, grad: jax.Array) -> jax.Array:
        row = self.split.table[path]
        assert row.grad is not None
        grad = on_device(grad).astype(row.grad.dtype)
        if not self.placed:
            return grad
        grad = pad(grad, row.shape(row.grad))
        return constrain(grad, self.split.table.sharding(row.grad), "pipeline.outer")


def _add(total: jax.Array, grad: jax.Array, factor: Any, busy: Any) -> jax.Array:
    """total + grad * factor where there is any: selected, not multiplied, for it may be NaN."""
    wide = jnp.promote_types(total.dtype, factor.dtype)
    more = total.astype(wide) + grad.astype(wide) * factor.astype(wide)
    return jnp.where(busy, more.astype(total.dtype), total)
