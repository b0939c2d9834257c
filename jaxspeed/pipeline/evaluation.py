"""Evaluation loss of a batch over the stages: forward pass only."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.objective.accumulate import accumulate
from jaxspeed.objective.loss import Loss
from jaxspeed.pipeline.cpu_ordering import entering, once_all_there
from jaxspeed.pipeline.embed_and_head import after, before
from jaxspeed.pipeline.schedule import Schedule
from jaxspeed.pipeline.stage_program import Stage
from jaxspeed.pipeline.stage_shard_map import from_one, hand_on, on_stages
from jaxspeed.pipeline.step_values import Split, Values
from jaxspeed.pipeline.tick_loops import Phase, Tick, follow

State = tuple[Values, Loss]  # messages to the next stage, and what has left


def evaluated(split: Split, stage: Stage, schedule: Schedule) -> Loss:
    """The loss of all micro-batches."""
    stages, outer = split.stages, split.outer

    def tick(phase: Phase, state: State, row: Tick) -> State:
        ahead, seen = state
        entry = before(split, *entering(split, row.entering, ahead))

        def lane(number: Any, own: Any, every: Any) -> Any:
            now, weights, ahead = own
            entry, context = every
            x = stage.entered(number, now, entry, ahead)
            y = stage.run(stage.arguments(number, now, weights, context, x))
            end = from_one(y, number == stages - 1) if phase.head else []
            return hand_on(y, stages, 1), end

        own = (row.forward, stage.weights, ahead)
        ahead, end = on_stages(lane, stages, own, (entry, stage.context))
        if phase.head:
            seen, _ = accumulate(seen, after(split, row.leaving, outer, end))
        return ahead, seen

    ahead = once_all_there(split, stage.messages(), stage.weights, split.step)
    return follow(schedule, tick, (ahead, no_loss(split)))[1]


def no_loss(split: Split) -> Loss:
    """The loss of nothing, with the metrics of one."""

    def one() -> Loss:
        carry = [jnp.zeros(c.shape, c.dtype) for c in split.parts.carry]
        return after(split, jnp.zeros((), jnp.int32), split.outer, carry)

    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one))
