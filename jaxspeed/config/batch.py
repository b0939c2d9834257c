"""DeepSpeed's batch arithmetic.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps
                       x data-parallel size

Any two of the three give the third; the train or the micro batch alone makes the accumulation 1. In
a pipeline the accumulation is the number of micro-batches, and is chosen to fill it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings

# -- the micro-batches that a pipeline takes -------------------------------------------------------

# Of 4 K micro-batches, K stages spend (K - 1) / (5 K - 1) of a step waiting: less than a fifth.
ROUNDS = 4


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, as far as the number of micro-batches goes.

    Each stage needs at least one micro-batch to work on while the others work; the interleaved
    schedule sends them round in groups of as many as there are stages.
    """

    count: int = 1
    interleaved: bool = False

    def take(self, micro_batches: int) -> bool:
        """Whether a step of so many micro-batches can pass them."""
        whole_rounds = micro_batches % self.count == 0 or not self.interleaved
        return micro_batches >= self.count and whole_rounds

    @property
    def needed(self) -> str:
        """What `take` asks for, in words."""
        if self.interleaved:
            return f"a multiple of {self.count}, to interleave"
        return f"at least {self.count}"

    @property
    def unsaid(self) -> int:
        """The number of micro-batches where nothing bounds it."""
        return ROUNDS * self.count if self.count > 1 else 1

    def cut(self, samples: int) -> int:
        """In how many micro-batches to cut a rank's samples; 1 where no number of them fits.

        The largest multiple of the stages that divides the samples; without one, the largest
        divisor.
        """
        return max(
            self.cuts(samples), key=lambda number: (number % self.count == 0, number), default=1
        )

    def cuts(self, samples: int) -> list[int]:
        """The numbers of equal micro-batches up to `unsaid` that they take of so many samples."""
        numbers = range(self.count, min(self.unsaid, samples) + 1)
        return [number for number in numbers if samples % number == 0 and self.take(number)]

    def near(self, micro_batches: int, step: int | None = None) -> list[int]:
        """The one or two numbers nearest to this one that they take; with `step`, its multiples."""
        step = step or (self.count if self.interleaved else 1)
        below = micro_batches // step * step
        return [number for number in (below, below + step) if number >= self.count] or [self.count]


# -- the numbers that a config sets, and what is wrong where they contradict each other ------------

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
SCHEDULE = "parallel.pipeline_schedule"


@dataclass(frozen=True)
class Said:
    """The numbers of the batch that are known; `ranks` is the data-parallel size."""

    train: int | None
    micro: int | None
    accumulation: int | None
    ranks: int | None
    stages: Stages

    @property
    def per_rank(self) -> int:
        """The samples a data rank that are said."""
        return (self.micro or 1) * (self.accumulation or 1)

    @property
    def known(self) -> int:
        """What the train batch is a multiple of."""
        return self.per_rank * (self.ranks or 1)

    @property
    def holds(self) -> bool:
        """Whether the equation does, for some value of what is not said."""
        if self.train is None:
            return True
        exact = self.micro and self.accumulation
        return self.train == self.known if exact else self.train % self.known == 0

    def __str__(self) -> str:
        numbers = (self.train, self.micro, self.accumulation, self.ranks)
        train, micro, accumulation, ranks = ("?" if n is None else str(n) for n in numbers)
        return (
            f"{TRAIN} {train} = {MICRO} {micro} x {ACCUMULATION} {accumulation} "
            f"x data-parallel size {ranks}"
        )


def nothing_said(said: Said) -> Problem:
    """Neither the train nor the micro batch is said."""
    alone = f"{ACCUMULATION} {said.accumulation} alone" if said.accumulation else "no batch size"
    works = f"Needs {TRAIN} or {MICRO}: {said}."
    return Problem(ACCUMULATION if said.accumulation else TRAIN, alone, works)


def misfit(said: Said, train: int) -> Problem:
    """The equation does not hold."""
    exact = bool(said.micro and said.accumulation and said.ranks)
    nearest = [1] if exact else _near(said, train // said.known)
    works = [f"{TRAIN} {_either(number * said.known for number in nearest)}"]
    if said.ranks and (sizes := _rank_counts(said, train, said.ranks, exact)):
        works.append(f"data-parallel size {_either(sizes)}")
    if exact and said.micro and said.accumulation and said.ranks:
        micro, rest = divmod(train, said.accumulation * said.ranks)
        if not rest:
            works.append(f"{MICRO} {micro}")
        accumulation, rest = divmod(train, said.micro * said.ranks)
        if not rest and said.stages.take(accumulation):
            works.append(f"{ACCUMULATION} {accumulation}")
    found, about = f"{said}, which does not hold", (MICRO, ACCUMULATION)
    return Problem(TRAIN, found, f"Would work: {'; '.join(works)}.", about)


def _near(said: Said, multiple: int) -> list[int]:
    """The multiples of what is known, nearest to this one, that the stages take too."""
    if said.accumulation:
        return Stages().near(multiple)
    return said.stages.near(multiple, None if said.micro else said.stages.count)


def _rank_counts(said: Said, train: int, ranks: int, exact: bool) -> list[int]:
    """The numbers of data ranks nearest to `ranks` with which all is well."""
    if train % said.per_rank:
        return []
    most = train // said.per_rank
    if exact:
        return [most]

    def does(count: int) -> bool:
        if said.accumulation or most % count:
            return most % count == 0
        made = most // count
        return said.stages.take(made if said.micro else said.stages.cut(made))

    below = filter(does, range(min(ranks, most), 0, -1))
    above = filter(does, range(ranks + 1, min(most, 16 * ranks) + 1))
    return [count for count in (next(below, None), next(above, None)) if count]


def unfilled(said: Said, made: int) -> Problem:
    """The pipeline's stages cannot share out the `made` micro-batches of a step."""
    stages = said.stages
    if said.micro or said.accumulation:
        most = "" if said.ranks or said.accumulation else "at most "
        batches = "1 micro-batch" if made == 1 else f"{made} micro-batches"
        found = f"{most}{batches} for {stages.count} pipeline stages, by {said}"
    else:
        found = f"{said}, which no {stages.count} to {stages.unsaid} equal micro-batches divide"
    return Problem(
        ACCUMULATION if said.accumulation else TRAIN,
        found,
        f"Needs {stages.needed}. Would work: {'; '.join(_ways_to_fill(said, made))}.",
        (TRAIN, MICRO, ACCUMULATION, "mesh.pipe", "pipeline.stages", SCHEDULE),
    )


def _ways_to_fill(said: Said, made: int) -> Iterator[str]:
    """Changes each of which makes micro-batches that the stages take."""
    stages, ranks = said.stages, said.ranks or 1
    if said.train is None:
        yield f"{ACCUMULATION} {_either(stages.near(made))}"
    else:
        samples, rest = divmod(said.train, ranks)
        cuts = [] if rest else stages.cuts(samples)
        if cuts:
            cut = min(cuts, key=lambda number: abs(number - made))
            sizes = {ACCUMULATION: said.accumulation and cut, MICRO: said.micro and samples // cut}
            yield " with ".join(f"{word} {size}" for word, size in sizes.items() if size)
        if said.micro and said.accumulation:
            for number in stages.near(made):
                total = number * said.micro * ranks
                yield f"{ACCUMULATION} {number} with {TRAIN} {total}"
        elif said.micro:
            yield f"{TRAIN} {_either(n * said.micro * ranks for n in stages.near(made))}"
        elif not cuts:
            totals = _either(n * ranks for n in stages.near(samples, stages.count))
            raised = f"{ACCUMULATION} {stages.count} with " if said.accumulation else ""
            yield f"{raised}{TRAIN} {totals}"
    if stages.interleaved and made >= stages.count and said.holds:
        yield f'{SCHEDULE} "1f1b"'


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in numbers)


# -- the triple ------------------------------------------------------------------------------------


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
