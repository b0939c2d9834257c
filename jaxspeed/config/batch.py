"""DeepSpeed's batch arithmetic.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps
                       x data-parallel size

Any two of the three give the third; the train or the micro batch alone makes the accumulation 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxspeed.config.problems import Problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """One optimizer step: `train` samples as `accumulation` times `micro` a data rank."""

    train: int
    micro: int
    accumulation: int


def solve_batch(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> Batch | Problem:
    """The triple for so many data ranks, or what is wrong with it."""
    if train is None and micro is None:
        return _nothing_said(accumulation)
    known = (micro or 1) * (accumulation or 1) * ranks
    if train is None:
        return Batch(known, micro or 1, accumulation or 1)
    fits = train == known if micro and accumulation else train % known == 0
    if not fits:
        return _misfit(train, micro, accumulation, ranks)
    if micro is None:
        return Batch(train, train // known, accumulation or 1)
    return Batch(train, micro, accumulation or train // known)


def batch_problem(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int | None
) -> Problem | None:
    """What is wrong with a triple whose number of data ranks may not be known yet."""
    if train is None and micro is None:
        return None if accumulation is None else _nothing_said(accumulation)
    if ranks is not None:
        solved = solve_batch(train, micro, accumulation, ranks)
        return solved if isinstance(solved, Problem) else None
    if train is not None and train % ((micro or 1) * (accumulation or 1)):
        return _misfit(train, micro, accumulation, None)
    return None


def _nothing_said(accumulation: int | None) -> Problem:
    found = "no batch size" if accumulation is None else f"{ACCUMULATION} {accumulation} alone"
    works = f"Needs {TRAIN} or {MICRO}: {_equation(None, None, accumulation, None)}."
    return Problem(TRAIN if accumulation is None else ACCUMULATION, found, works)


def _misfit(train: int, micro: int | None, accumulation: int | None, ranks: int | None) -> Problem:
    per_rank = (micro or 1) * (accumulation or 1)
    known = per_rank * (ranks or 1)
    exact = micro is not None and accumulation is not None and ranks is not None
    nearest = [known] if exact else [train // known * known, (train // known + 1) * known]
    works = [f"{TRAIN} {_either(number for number in nearest if number)}"]
    if ranks is not None and (sizes := _rank_counts(train, per_rank, ranks, exact)):
        works.append(f"data-parallel size {_either(sizes)}")
    if exact and micro and accumulation and ranks:
        for name, others in ((MICRO, accumulation * ranks), (ACCUMULATION, micro * ranks)):
            if train % others == 0:
                works.append(f"{name} {train // others}")
    return Problem(
        TRAIN,
        f"{_equation(train, micro, accumulation, ranks)}, which does not hold",
        f"Would work: {'; '.join(works)}.",
        about=(MICRO, ACCUMULATION),
    )


def _rank_counts(train: int, per_rank: int, ranks: int, exact: bool) -> list[int]:
    """The numbers of data ranks nearest to `ranks` with which the equation holds."""
    if train % per_rank:
        return []
    most = train // per_rank
    if exact:
        return [most]
    below = next(count for count in range(min(ranks, most), 0, -1) if most % count == 0)
    above = [count for count in range(ranks + 1, min(most, 16 * ranks) + 1) if most % count == 0]
    return [below, *above[:1]]


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _equation(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int | None
) -> str:
    train_, micro_, accumulation_, ranks_ = (
        "?" if number is None else str(number) for number in (train, micro, accumulation, ranks)
    )
    return (
        f"{TRAIN} {train_} = {MICRO} {micro_} x {ACCUMULATION} {accumulation_} "
        f"x data-parallel size {ranks_}"
    )
