"""DeepSpeed's batch arithmetic.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps
                       x data-parallel size

Any two of the three give the third; the train or the micro batch alone makes the accumulation 1. In
a pipeline the accumulation is the number of micro-batches, and is chosen to fill it.
"""

from dataclasses import dataclass, replace

from jaxspeed.config.batch_problems import Said, misfit, nothing_said, unfilled
from jaxspeed.config.micro_batch_counts import Stages
from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings


@dataclass(frozen=True)
class Batch:
    """One optimizer step: `train` samples as `accumulation` times `micro` a data rank."""

    train: int
    micro: int
    accumulation: int


def said_of(settings: Settings, ranks: int | None, stages: Stages) -> Said:
    """What a config says of the batch, for so many data ranks and stages."""
    return Said(
        settings.train_batch_size,
        settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps,
        ranks,
        stages,
    )


def solve_batch(said: Said) -> Batch | Problem:
    """The triple, or what is wrong with it.

    For an unknown number of data ranks it is that of one: whatever is wrong there is wrong with
    any number.
    """
    train, made, stages = said.train, said.accumulation, said.stages
    if train is None and said.micro is None:
        return nothing_said(said)
    if made is not None and not stages.take(made):
        return unfilled(said, made)
    if train is None:
        made = made or stages.unsaid
        train = (said.micro or 1) * made * (said.ranks or 1)
    if not said.holds:
        return misfit(said, train)
    made = made or (train // said.known if said.micro else stages.cut(train // said.known))
    if not stages.take(made):
        return unfilled(said, made)
    return Batch(train, train // (made * (said.ranks or 1)), made)


def batch_problem(said: Said) -> Problem | None:
    """What is wrong with a triple whose number of data ranks may not be known yet."""
    if said.train is None and said.micro is None and said.accumulation is None:
        return None
    if said.ranks is None and said.train and said.micro and said.accumulation:
        ranks, rest = divmod(said.train, said.per_rank)
        said = said if rest else replace(said, ranks=ranks)
    solved = solve_batch(said)
    return solved if isinstance(solved, Problem) else None
