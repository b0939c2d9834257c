"""`Pipeline`: gradients and evaluation of a loss whose blocks run on the stages of the mesh."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxspeed.config.remat import Recompute
from jaxspeed.pipeline.evaluation import evaluate
from jaxspeed.pipeline.packed_layout import PackedLayout
from jaxspeed.pipeline.schedule import Schedule, forward_only, schedule
from jaxspeed.pipeline.stage_layout import StageLayout
from jaxspeed.pipeline.stage_program import Stage
from jaxspeed.pipeline.step_values import SplitStep
from jaxspeed.pipeline.training import Training
from jaxspeed.pipeline.unlike_program import UnlikeStage
from jaxspeed.placement.stacks import UnlikeStages
from jaxspeed.traced_loss.accumulate import Sums, micro_batches
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train_state.state import Arrays


@dataclass(frozen=True)
class Pipeline:
    """A schedule, and what the stages save, recompute and gather."""

    traced_loss: MicroBatchLoss
    name: str = "1f1b"
    chunks: int = 1
    recompute: str = "stage"  # or "layers", or "save"
    gather: str = "tick"  # or "step": when ZeRO 3 gathers a stage's weights

    @property
    def layout(self) -> StageLayout | PackedLayout:
        if isinstance(self.traced_loss.table.stack, UnlikeStages):
            return PackedLayout(self.traced_loss.table)
        return StageLayout(self.traced_loss.table, self.chunks)

    @property
    def stages(self) -> int:
        return self.layout.stages

    def schedule(self, micro_batches: int) -> Schedule:
        return schedule(self.name, self.stages, micro_batches, self.chunks)

    def gradients(
        self, sources: Arrays, variables: Arrays, micro: Any, step: Any, scale: Any
    ) -> tuple[Sums, Arrays]:
        """Gradients and loss of micro-batches [micro-batches, ...], and changed variables.

        `sources` and the gradients are in the stage layout.
        """
        split = SplitStep(self.traced_loss, self.layout, sources, variables, micro, step, True)
        count = jax.tree.leaves(micro)[0].shape[0]
        host_ratio = self.traced_loss.recompute.host_ratio
        stage = self._stage(split)
        training = Training(split, stage, self.recompute == "save", scale, host_ratio)
        return training.run(self.schedule(count))

    def evaluate(self, sources: Arrays, variables: Arrays, batch: Any, step: Any) -> Loss:
        """The loss of a batch in evaluation mode, in as many micro-batches as fill the stages.

        A loss or metric that mixes samples, or that draws random numbers, runs as one micro-batch.
        """
        variables = self.traced_loss.with_squares(sources, variables)
        sources = self.layout.by_stage(sources, step)

        def split(count: int, ranks: int) -> SplitStep:
            micro = micro_batches(batch, count, ranks)
            args = (sources, variables, micro, step, False)
            return SplitStep(self.traced_loss, self.layout, *args)

        count, full = 1, split(1, 1)
        ranks = self.traced_loss.table.ranks
        if full.samples and full.program.is_sum:
            share = full.samples // ranks
            most = max(n for n in range(1, 4 * self.stages + 1) if share % n == 0)
            count = most if full.is_sum_of_parts(most) else 1
        parts = full if count == 1 else split(count, ranks)
        return evaluate(parts, self._stage(parts), forward_only(self.stages, count, self.chunks))

    def _stage(self, split: SplitStep) -> Stage:
        recompute = self.traced_loss.recompute
        if not recompute and self.recompute == "layers":
            recompute = Recompute("full")
        # Only the inputs saved between ticks are offloaded, not the residuals within a tick.
        recompute = replace(recompute, host_ratio=0.0)
        kind = UnlikeStage if isinstance(split.layout.stack, UnlikeStages) else Stage
        stage = kind(split, self.chunks, recompute, self.gather == "step")
        # Computed once, here: first used in the loop over ticks, they would be computed per tick.
        _ = split.outer, split.mean_weights, stage.weights, stage.context
        return stage
