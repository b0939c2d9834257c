"""Phases of a schedule: runs of ticks with the same kinds of work, one loop each.

All stages run one program, so a tick's program contains the work of any stage in it. Ticks of the
same kinds share one loop body, and the warm-up runs no backward pass. One body is compiled per
phase, so their number must not grow with the micro-batches: repeated phases are one `Repeat`.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jaxspeed.pipeline.schedule import Schedule


class Phase(NamedTuple):
    """Consecutive ticks in which the same kinds of work happen on any of the stages."""

    forward: bool
    backward: bool
    head: bool  # head and loss of a micro-batch run
    length: int  # ticks


class Repeat(NamedTuple):
    """Consecutive phases, repeated `times` times."""

    times: int
    phases: tuple[Phase, ...]


def phases(schedule: Schedule) -> tuple[Repeat, ...]:
    """The schedule's ticks in order, each in exactly one phase.

    1f1b is a warm-up of K-1 forward ticks, M of both with the head, and K-1 backward ticks.
    Interleaved, the head runs in K ticks of each v K, so that the middle repeats.
    """
    forward = schedule.forward.busy.any(axis=1)
    backward = schedule.backward.busy.any(axis=1)
    head = schedule.leaving >= 0
    kinds = np.stack([forward, backward, head], axis=1).tolist()
    runs = [Phase(f, b, h, len(list(run))) for (f, b, h), run in groupby(kinds)]
    return tuple(_fold_repeats(runs))


def _fold_repeats(runs: Sequence[Phase]) -> Iterator[Repeat]:
    """The runs, with consecutive repetitions of a pattern as one Repeat."""
    at = 0
    while at < len(runs):
        times, pattern = _repeat_at(runs, at)
        yield Repeat(times, pattern)
        at += times * len(pattern)


def _repeat_at(runs: Sequence[Phase], at: int) -> tuple[int, tuple[Phase, ...]]:
    """The pair of runs that repeats from `at` on, and its count; else the one run, once.

    Only a pair can repeat: neighbours differ, and the head runs at regular intervals.
    """
    pair = tuple(runs[at : at + 2])
    times = 1
    while tuple(runs[at + 2 * times : at + 2 * times + 2]) == pair:
        times += 1
    return (times, pair) if len(pair) == 2 and times > 1 else (1, pair[:1])
