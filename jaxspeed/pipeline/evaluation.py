"""Pipelined evaluation loss: the forward pass alone."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.objectives.terms_and_metrics import of_none
from jaxspeed.pipeline.cpu_ordering import all_ordered_after, entering
from jaxspeed.pipeline.embed_and_head import embed, head_and_loss
from jaxspeed.pipeline.schedule import Schedule
from jaxspeed.pipeline.stage_program import Stage
from jaxspeed.pipeline.stage_shard_map import broadcast_from, on_stages, send_to_stage
from jaxspeed.pipeline.step_values import SplitStep, Values
from jaxspeed.pipeline.tick_loops import Phase, Tick, run_ticks
from jaxspeed.traced_loss.accumulate import accumulate
from jaxspeed.traced_loss.loss import Loss

State = tuple[Values, Loss]  # messages to the next stage, and the loss so far


def evaluate(split: SplitStep, stage: Stage, schedule: Schedule) -> Loss:
    """The loss of all micro-batches."""
    stages, outer = split.stages, split.outer

    def tick(phase: Phase, state: State, row: Tick) -> State:
        ahead, seen = state
        entry = embed(split, *entering(split, row.entering, ahead))

        def stage_body(number: Any, stage_row: Any, every: Any) -> Any:
            work, weights, ahead = stage_row
            entry, context = every
            x = stage.entered(number, work, entry, ahead)
            y = stage.run(stage.arguments(number, work, weights, context, x))
            end = broadcast_from(y, number == stages - 1) if phase.head else []
            return send_to_stage(y, stages, 1), end

        per_stage = (row.forward, stage.weights, ahead)
        ahead, end = on_stages(stage_body, stages, per_stage, (entry, stage.context))
        if phase.head:
            loss, _ = head_and_loss(split, row.leaving, outer, end, {})
            seen, _ = accumulate(seen, loss)
        return ahead, seen

    ahead = all_ordered_after(split, stage.messages(), stage.weights, split.step)
    return run_ticks(schedule, tick, (ahead, no_loss(split)))[1]


def no_loss(split: SplitStep) -> Loss:
    """A zero loss with the metrics of the model's."""

    def one() -> Loss:
        carry = [jnp.zeros(c.shape, c.dtype) for c in split.parts.carry]
        return head_and_loss(split, jnp.zeros((), jnp.int32), split.outer, carry, {})[0]

    empty: Loss = of_none(jax.eval_shape(one))
    return empty
