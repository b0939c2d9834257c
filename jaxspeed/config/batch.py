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

# -- numbers of micro-batches that fill a pipeline -------------------------------------------------

# With 4 K micro-batches, K stages idle (K - 1) / (5 K - 1) of a step: less than a fifth.
ROUNDS = 4


@dataclass(frozen=True)
class Stages:
    """Constraints of pipeline stages on the number of micro-batches.

    At least one per stage, so that all work at once; the interleaved schedule sends them round in
    groups of as many as there are stages.
    """

    count: int = 1
    interleaved: bool = False

    def accepts(self, micro_batches: int) -> bool:
        """Whether a step may have so many micro-batches."""
        full_rounds = micro_batches % self.count == 0 or not self.interleaved
        return micro_batches >= self.count and full_rounds

    @property
    def needed(self) -> str:
        """Text of what `accepts` requires."""
        if self.interleaved:
            return f"a multiple of {self.count}, to interleave"
        return f"at least {self.count}"

    @property
    def default(self) -> int:
        """Number of micro-batches where no key sets it."""
        return ROUNDS * self.count if self.count > 1 else 1

    def split(self, samples: int) -> int:
        """Number of micro-batches to split a rank's samples into; 1 where none fits.

        The largest multiple of the stages that divides the samples; without one, the largest
        divisor.
        """
        return max(
            self.splits(samples), key=lambda number: (number % self.count == 0, number), default=1
        )

    def splits(self, samples: int) -> list[int]:
        """Accepted numbers of equal micro-batches, up to `default`, for so many samples."""
        numbers = range(self.count, min(self.default, samples) + 1)
        return [number for number in numbers if samples % number == 0 and self.accepts(number)]

    def near(self, micro_batches: int, step: int | None = None) -> list[int]:
        """The one or two nearest accepted numbers; with `step`, multiples of it."""
        step = step or (self.count if self.interleaved else 1)
        below = micro_batches // step * step
        return [number for number in (below, below + step) if number >= self.count] or [self.count]


# -- the batch sizes that a config sets, and their contradictions ----------------------------------

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
SCHEDULE = "parallel.pipeline_schedule"


@dataclass(frozen=True)
class BatchKeys:
    """Batch sizes that the config sets; `ranks` is the data-parallel size."""

    train: int | None
    micro: int | None
    accumulation: int | None
    ranks: int | None
    stages: Stages

    @property
    def per_rank(self) -> int:
        """Samples per data rank that the config sets."""
        return (self.micro or 1) * (self.accumulation or 1)

    @property
    def known(self) -> int:
        """Known divisor of the train batch."""
        return self.per_rank * (self.ranks or 1)

    @property
    def holds(self) -> bool:
        """Whether the equation holds for some value of the sizes that are not set."""
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


def no_batch_size(keys: BatchKeys) -> Problem:
    """Problem: neither the train nor the micro-batch size is set."""
    alone = f"{ACCUMULATION} {keys.accumulation} alone" if keys.accumulation else "no batch size"
    works = f"Needs {TRAIN} or {MICRO}: {keys}."
    return Problem(ACCUMULATION if keys.accumulation else TRAIN, alone, works)


def misfit(keys: BatchKeys, train: int) -> Problem:
    """Problem: the equation does not hold."""
    exact = bool(keys.micro and keys.accumulation and keys.ranks)
    nearest = [1] if exact else _near(keys, train // keys.known)
    works = [f"{TRAIN} {_either(number * keys.known for number in nearest)}"]
    if keys.ranks and (sizes := _rank_counts(keys, train, keys.ranks, exact)):
        works.append(f"data-parallel size {_either(sizes)}")
    if exact and keys.micro and keys.accumulation and keys.ranks:
        micro, rest = divmod(train, keys.accumulation * keys.ranks)
        if not rest:
            works.append(f"{MICRO} {micro}")
        accumulation, rest = divmod(train, keys.micro * keys.ranks)
        if not rest and keys.stages.accepts(accumulation):
            works.append(f"{ACCUMULATION} {accumulation}")
    actual, about = f"{keys}, which does not hold", (MICRO, ACCUMULATION)
    return Problem(TRAIN, actual, f"Would work: {'; '.join(works)}.", about)


def _near(keys: BatchKeys, multiple: int) -> list[int]:
    """Nearest multiples of the known divisor that the stages also accept."""
    if keys.accumulation:
        return Stages().near(multiple)
    return keys.stages.near(multiple, None if keys.micro else keys.stages.count)


def _rank_counts(keys: BatchKeys, train: int, ranks: int, exact: bool) -> list[int]:
    """Numbers of data ranks nearest to `ranks` for which the equation holds."""
    if train % keys.per_rank:
        return []
    most = train // keys.per_rank
    if exact:
        return [most]

    def fits(count: int) -> bool:
        if keys.accumulation or most % count:
            return most % count == 0
        micro_batches = most // count
        return keys.stages.accepts(
            micro_batches if keys.micro else keys.stages.split(micro_batches)
        )

    below = filter(fits, range(min(ranks, most), 0, -1))
    above = filter(fits, range(ranks + 1, min(most, 16 * ranks) + 1))
    return [count for count in (next(below, None), next(above, None)) if count]


def unfilled(keys: BatchKeys, micro_batches: int) -> Problem:
    """Problem: the `micro_batches` of a step do not fill the pipeline's stages."""
    stages = keys.stages
    if keys.micro or keys.accumulation:
        most = "" if keys.ranks or keys.accumulation else "at most "
        batches = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        actual = f"{most}{batches} for {stages.count} pipeline stages, by {keys}"
    else:
        actual = f"{keys}, which no {stages.count} to {stages.default} equal micro-batches divide"
    return Problem(
        ACCUMULATION if keys.accumulation else TRAIN,
        actual,
        f"Needs {stages.needed}. Would work: {'; '.join(_alternatives(keys, micro_batches))}.",
        (TRAIN, MICRO, ACCUMULATION, "mesh.pipe", "pipeline.stages", SCHEDULE),
    )


def _alternatives(keys: BatchKeys, micro_batches: int) -> Iterator[str]:
    """Changes each of which gives micro-batches that the stages accept."""
    stages, ranks = keys.stages, keys.ranks or 1
    if keys.train is None:
        yield f"{ACCUMULATION} {_either(stages.near(micro_batches))}"
    else:
        samples, rest = divmod(keys.train, ranks)
        splits = [] if rest else stages.splits(samples)
        if splits:
            number = min(splits, key=lambda count: abs(count - micro_batches))
            sizes = {
                ACCUMULATION: keys.accumulation and number,
                MICRO: keys.micro and samples // number,
            }
            yield " with ".join(f"{key} {size}" for key, size in sizes.items() if size)
        if keys.micro and keys.accumulation:
            for number in stages.near(micro_batches):
                total = number * keys.micro * ranks
                yield f"{ACCUMULATION} {number} with {TRAIN} {total}"
        elif keys.micro:
            yield f"{TRAIN} {_either(n * keys.micro * ranks for n in stages.near(micro_batches))}"
        elif not splits:
            totals = _either(n * ranks for n in stages.near(samples, stages.count))
            raised = f"{ACCUMULATION} {stages.count} with " if keys.accumulation else ""
            yield f"{raised}{TRAIN} {totals}"
    if stages.interleaved and micro_batches >= stages.count and keys.holds:
        yield f'{SCHEDULE} "1f1b"'


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in numbers)


# -- the triple ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One optimizer step: `train` samples, as `accumulation` times `micro` per data rank."""

    train: int
    micro: int
    accumulation: int


def batch_keys(settings: Settings, ranks: int | None, stages: Stages) -> BatchKeys:
    """Collect the batch sizes of a config, for so many data ranks and stages."""
    return BatchKeys(
        settings.train_batch_size,
        settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps,
        ranks,
        stages,
    )


def solve_batch(keys: BatchKeys) -> Batch | Problem:
    """Solve for the triple, or return its problem.

    An unknown number of data ranks counts as one: what is wrong then is wrong with any number.
    """
    train, micro_batches, stages = keys.train, keys.accumulation, keys.stages
    if train is None and keys.micro is None:
        return no_batch_size(keys)
    if micro_batches is not None and not stages.accepts(micro_batches):
        return unfilled(keys, micro_batches)
    if train is None:
        micro_batches = micro_batches or stages.default
        train = (keys.micro or 1) * micro_batches * (keys.ranks or 1)
    if not keys.holds:
        return misfit(keys, train)
    micro_batches = micro_batches or (
        train // keys.known if keys.micro else stages.split(train // keys.known)
    )
    if not stages.accepts(micro_batches):
        return unfilled(keys, micro_batches)
    return Batch(train, train // (micro_batches * (keys.ranks or 1)), micro_batches)


def batch_problem(keys: BatchKeys) -> Problem | None:
    """Check a triple whose number of data ranks may not be known yet."""
    if keys.train is None and keys.micro is None and keys.accumulation is None:
        return None
    if keys.ranks is None and keys.train and keys.micro and keys.accumulation:
        ranks, rest = divmod(keys.train, keys.per_rank)
        keys = keys if rest else replace(keys, ranks=ranks)
    solved = solve_batch(keys)
    return solved if isinstance(solved, Problem) else None
