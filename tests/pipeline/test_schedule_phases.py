"""Phases of a schedule: its ticks in few loops, each with only the work of its ticks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.pipeline.schedule import Schedule, forward_only, schedule
from jaxspeed.pipeline.tick_loops import Phase, Repeat, phases

pytestmark = pytest.mark.fast

F = (True, False, False)
F_HEAD = (True, False, True)
BOTH = (True, True, False)
BOTH_HEAD = (True, True, True)
B = (False, True, False)
B_HEAD = (False, True, True)


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "forward"]))
    stages, turns, chunks = (draw(st.integers(1, most)) for most in (6, 20, 4))
    if name == "interleaved":
        return schedule(name, stages, stages * turns, chunks)
    more = draw(st.integers(0, stages - 1))
    if name == "forward":
        return forward_only(stages, stages * turns - more, chunks)
    return schedule(name, stages, stages * turns + more)


def once(kinds: tuple[bool, bool, bool], length: int) -> Repeat:
    return Repeat(1, (Phase(*kinds, length),))


def in_order(repeats: tuple[Repeat, ...]) -> list[Phase]:
    return [phase for repeat in repeats for phase in repeat.phases * repeat.times]


@given(any_schedule())
def test_phases_have_the_kinds_of_work_of_each_tick(table: Schedule) -> None:
    said = [phase[:3] for phase in in_order(phases(table)) for _ in range(phase.length)]
    happens = [
        (bool((f >= 0).any()), bool((b >= 0).any()), bool(leaving >= 0))
        for f, b, leaving in zip(table.forward.micro, table.backward.micro, table.leaving)
    ]
    assert said == happens


@given(any_schedule())
def test_neighbouring_phases_differ(table: Schedule) -> None:
    kinds = [phase[:3] for phase in in_order(phases(table))]
    assert all(one != other for one, other in pairwise(kinds))


@given(any_schedule())
def test_there_are_at_most_five_bodies(table: Schedule) -> None:
    assert sum(len(repeat.phases) for repeat in phases(table)) <= 5


@given(any_schedule())
def test_only_what_comes_several_times_is_a_repeat_of_several_phases(table: Schedule) -> None:
    for repeat in phases(table):
        assert (len(repeat.phases) == 1) == (repeat.times == 1)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 9), (8, 64)])
def test_1f1b_is_warm_up_steady_and_cool_down(stages: int, micro_batches: int) -> None:
    assert phases(schedule("1f1b", stages, micro_batches)) == (
        once(F, stages - 1),
        once(BOTH_HEAD, micro_batches),
        once(B, stages - 1),
    )


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 9), (8, 64)])
def test_gpipe_is_all_forwards_then_all_backwards(stages: int, micro_batches: int) -> None:
    assert phases(schedule("gpipe", stages, micro_batches)) == (
        once(F, micro_batches + stages - 1),
        once(B_HEAD, micro_batches),
        once(B, stages - 1),
    )


def test_one_stage_has_no_warm_up() -> None:
    assert phases(schedule("1f1b", 1, 5)) == (once(BOTH_HEAD, 5),)
    assert phases(schedule("gpipe", 1, 5)) == (once(F, 5), once(B_HEAD, 5))


def test_the_head_of_an_interleaved_schedule_comes_and_goes() -> None:
    assert phases(schedule("interleaved", stages=4, micro_batches=16, chunks=3)) == (
        once(F, 11),
        Repeat(3, (Phase(*BOTH_HEAD, 4), Phase(*BOTH, 8))),
        once(BOTH_HEAD, 4),
        once(B, 11),
    )


def test_an_evaluation_has_no_backward_phase() -> None:
    assert phases(forward_only(stages=4, micro_batches=8)) == (once(F, 3), once(F_HEAD, 8))
    assert phases(forward_only(stages=4, micro_batches=10, chunks=2)) == (
        once(F, 7),
        Repeat(2, (Phase(*F_HEAD, 4), Phase(*F, 4))),
        once(F_HEAD, 2),
    )


@given(any_schedule())
def test_lengths_and_times_are_plain_numbers(table: Schedule) -> None:
    for repeat in phases(table):
        assert type(repeat.times) is int
        assert all(type(phase.length) is int for phase in repeat.phases)
        assert not any(isinstance(kind, np.bool_) for phase in repeat.phases for kind in phase)
