"""Execution of a schedule's ticks: one `lax.scan` per phase, a run of ticks with the same work.

All stages run one program, so a tick's program contains the work of any stage in it. Ticks of the
same kinds share one loop body, and the warm-up runs no backward pass. One body is compiled per
phase, so their number must not grow with the micro-batches: repeated phases are one `Repeat`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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


class StageWork(NamedTuple):
    """Each stage's work in one direction of a tick, int32 [stages]; inside a stage, scalars."""

    micro: jax.Array  # -1 where it is idle
    chunk: jax.Array
    slot: jax.Array


class Tick(NamedTuple):
    """One tick of the table; micro-batches are -1 for none."""

    forward: StageWork
    backward: StageWork
    entering: jax.Array
    leaving: jax.Array
    returning: jax.Array


def run_ticks[State](
    schedule: Schedule, tick: Callable[[Phase, State, Tick], State], state: State
) -> State:
    """The state after all ticks; each maps the state to the next."""
    s = schedule
    forward, backward = (StageWork(*map(jnp.asarray, work)) for work in (s.forward, s.backward))
    through = map(jnp.asarray, (s.entering, s.leaving, s.returning))
    table = Tick(forward, backward, *through)
    start = 0
    for times, run in phases(schedule):
        stop = start + times * sum(phase.length for phase in run)
        rows = jax.tree.map(lambda x: x[start:stop], table)  # noqa: B023
        start = stop
        if times == 1:
            state = _run_phases(run, rows, tick, state)
        else:
            repeats = jax.tree.map(lambda x: x.reshape(times, -1, *x.shape[1:]), rows)  # noqa: B023

            def repeat(state: State, rows: Tick, run: Any = run) -> tuple[State, None]:
                return _run_phases(run, rows, tick, state), None

            state, _ = jax.lax.scan(repeat, state, repeats)
    return state


def _run_phases[State](run: Any, rows: Tick, tick: Callable[..., State], state: State) -> State:
    """The state after some phases, with the table's rows of their ticks."""
    start = 0
    for phase in run:
        stop = start + phase.length
        phase_rows = jax.tree.map(lambda x: x[start:stop], rows)  # noqa: B023
        start = stop

        def step(state: State, row: Tick, phase: Phase = phase) -> tuple[State, None]:
            return tick(phase, state, row), None

        state, _ = jax.lax.scan(step, state, phase_rows)
    return state
