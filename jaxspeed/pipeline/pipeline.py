"""The pipeline of a program: how its blocks run over the stages of the mesh."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxspeed.config.remat import Recompute
from jaxspeed.objective.accumulate import Sums, micro_batches
from jaxspeed.objective.loss import Loss
from jaxspeed.objective.objective import Objective
from jaxspeed.objective.train_state import Arrays
from jaxspeed.pipeline.evaluation import evaluated
from jaxspeed.pipeline.schedule import Schedule, forward_only, schedule
from jaxspeed.pipeline.stage_layout import Arrangement
from jaxspeed.pipeline.stage_program import Stage
from jaxspeed.pipeline.step_values import Split
from jaxspeed.pipeline.training import Training
from jaxspeed.placement.mesh import data_parallel_size


@dataclass(frozen=True)
class Pipeline:
    """A schedule over the stages, and what they keep, make again and gather."""

    objective: Objective
    name: str = "1f1b"
    chunks: int = 1
    recompute: str = "stage"  # or "layers", or "save"
    gather: str = "tick"  # or "step": when ZeRO 3 gathers a stage's weights

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.objective.table, self.chunks)

    @property
    def stages(self) -> int:
        return self.arrangement.stages

    def schedule(self, micro_batches: int) -> Schedule:
        return schedule(self.name, self.stages, micro_batches, self.chunks)

    def gradients(
        self, sources: Arrays, variables: Arrays, micro: Any, step: Any, scale: Any, placed: bool
    ) -> Sums:
        """Gradients and loss of micro-batches [micro-batches, ...].

        `sources` are arranged, and so are the gradients.
        """
        split = Split(self.objective, self.arrangement, sources, variables, micro, step, True)
        count = jax.tree.leaves(micro)[0].shape[0]
        on_host = self.objective.recompute.on_host
        stage = self._stage(split)
        training = Training(split, stage, self.recompute == "save", scale, placed, on_host)
        return training.run(self.schedule(count))

    def evaluate(self, sources: Arrays, variables: Arrays, batch: Any, step: Any) -> Loss:
        """The loss of a batch in evaluation mode, in as many micro-batches as fill the stages.

        One that is no sum over samples, or that draws random numbers, is left whole.
        """
        sources = self.arrangement.arranged(sources, step)

        def split(count: int, ranks: int) -> Split:
            micro = micro_batches(batch, count, ranks)
            args = (sources, variables, micro, step, False)
            return Split(self.objective, self.arrangement, *args)

        count, whole = 1, split(1, 1)
        ranks = data_parallel_size(self.objective.table.mesh)
        if whole.samples and whole.program.is_sum and not whole.program.draws_random_numbers:
            share = whole.samples // ranks
            count = max(n for n in range(1, 4 * self.stages + 1) if share % n == 0)
        parts = whole if count == 1 else split(count, ranks)
        return evaluated(parts, self._stage(parts), forward_only(self.stages, count, self.chunks))

    def _stage(self, split: Split) -> Stage:
        recompute = self.objective.recompute
        if not recompute and self.recompute == "layers":
            recompute = Recompute("full")
        # Between ticks stages keep inputs, and those wait in host memory; within one nothing does.
        recompute = replace(recompute, on_host=False)
        stage = Stage(split, self.chunks, recompute, self.gather == "step")
        # Made once, here: what the loop over ticks makes first would be made in each tick.
        _ = split.outer, stage.weights, stage.context
        return stage
