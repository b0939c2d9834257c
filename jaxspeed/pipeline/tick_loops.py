"""Execution of a schedule's ticks: one `lax.scan` per phase."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxspeed.pipeline.phases import Phase, phases
from jaxspeed.pipeline.schedule import Schedule

State = TypeVar("State")


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


def run_ticks(
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


def _run_phases(run: Any, rows: Tick, tick: Callable[..., State], state: State) -> State:
    """The state after some phases, with the table's rows of their ticks."""
    start = 0
    for phase in run:
        stop = start + phase.length
        own = jax.tree.map(lambda x: x[start:stop], rows)  # noqa: B023
        start = stop

        def step(state: State, row: Tick, phase: Phase = phase) -> tuple[State, None]:
            return tick(phase, state, row), None

        state, _ = jax.lax.scan(step, state, own)
    return state
