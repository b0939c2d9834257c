"""Pipeline schedules: invariants of a table for lockstep stages."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.errors import ConfigError
from jaxspeed.pipeline.schedule import SCHEDULES, Schedule, WorkTable, forward_only, schedule

pytestmark = pytest.mark.fast


@st.composite
def training(draw: st.DrawFn, names: tuple[str, ...] = SCHEDULES) -> Schedule:
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(1, 6))
    if name == "interleaved":
        micro_batches = stages * draw(st.integers(1, 6))
        return schedule(name, stages, micro_batches, chunks=draw(st.integers(1, 4)))
    return schedule(name, stages, draw(st.integers(stages, 30)))


evaluating = st.builds(
    forward_only,
    stages=st.integers(1, 6),
    micro_batches=st.integers(1, 30),
    chunks=st.integers(1, 4),
)


def units(work: WorkTable) -> Iterator[tuple[int, int, int, int]]:
    """(tick, stage, micro-batch, chunk) of every cell that is not idle, in order of ticks."""
    for tick, stage in np.argwhere(work.micro >= 0).tolist():
        yield tick, stage, int(work.micro[tick, stage]), int(work.chunk[tick, stage])


def tick_of(table: Schedule, work: WorkTable) -> dict[tuple[int, int], int]:
    """The tick of each micro-batch in each global chunk of the model."""
    return {
        (micro, chunk * table.stages + stage): tick for tick, stage, micro, chunk in units(work)
    }


def everything(table: Schedule) -> Counter[tuple[int, int, int]]:
    return Counter(product(range(table.stages), range(table.micro_batches), range(table.chunks)))


def global_chunks(table: Schedule) -> int:
    return table.stages * table.chunks


def neighbours(table: Schedule) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for micro, g in product(range(table.micro_batches), range(global_chunks(table) - 1)):
        yield (micro, g), (micro, g + 1)


@given(training())
def test_each_chunk_of_each_micro_batch_runs_once_in_each_direction(table: Schedule) -> None:
    for work in (table.forward, table.backward):
        assert Counter(cell[1:] for cell in units(work)) == everything(table)


@given(training())
def test_each_output_is_used_in_the_next_tick(table: Schedule) -> None:
    forward, backward = tick_of(table, table.forward), tick_of(table, table.backward)
    for earlier, later in neighbours(table):
        assert forward[later] == forward[earlier] + 1
        assert backward[earlier] == backward[later] + 1


@given(training())
def test_no_chunk_runs_backward_before_its_forward(table: Schedule) -> None:
    forward, backward = tick_of(table, table.forward), tick_of(table, table.backward)
    assert all(backward[cell] >= forward[cell] for cell in forward)


@given(training(("1f1b", "interleaved")))
def test_a_micro_batch_turns_round_in_one_tick_of_1f1b(table: Schedule) -> None:
    forward, backward = tick_of(table, table.forward), tick_of(table, table.backward)
    last = global_chunks(table) - 1
    for micro in range(table.micro_batches):
        assert backward[micro, last] == forward[micro, last]


@given(training(("gpipe",)))
def test_gpipe_runs_all_forwards_first(table: Schedule) -> None:
    forward, backward = tick_of(table, table.forward), tick_of(table, table.backward)
    assert max(forward.values()) + 1 == min(backward.values())


@given(training())
def test_a_saved_input_is_not_overwritten_before_its_backward(table: Schedule) -> None:
    buffers: list[dict[int, tuple[int, int]]] = [{} for _ in range(table.stages)]
    most = 0
    for tick, stage in product(range(table.ticks), range(table.stages)):
        buffer = buffers[stage]
        micro, chunk, slot = (int(part[tick, stage]) for part in table.forward)
        if micro >= 0:
            assert 0 <= slot < table.slots
            assert slot not in buffer
            buffer[slot] = micro, chunk
        most = max(most, len(buffer))
        micro, chunk, slot = (int(part[tick, stage]) for part in table.backward)
        if micro >= 0:
            assert buffer.pop(slot) == (micro, chunk)
    assert most == table.live_inputs == table.slots
    assert not any(buffers)


@given(training(("1f1b", "interleaved")))
def test_1f1b_saves_no_more_inputs_with_more_micro_batches(table: Schedule) -> None:
    bound = table.chunks * table.stages + table.stages - 1
    assert table.live_inputs <= bound
    if table.micro_batches >= 2 * table.stages:
        assert table.live_inputs == bound


@given(training(("gpipe",)))
def test_gpipe_saves_the_inputs_of_all_micro_batches(table: Schedule) -> None:
    assert table.live_inputs == table.micro_batches


@given(training())
def test_the_bubble_is_that_of_the_papers(table: Schedule) -> None:
    ideal = table.chunks * table.micro_batches + table.stages - 1
    assert table.forward_units == table.backward_units == table.ideal == ideal
    assert table.bubble == (table.stages - 1) / ideal


@given(training())
def test_a_message_goes_between_stages_after_all_chunks_but_the_last(table: Schedule) -> None:
    crossing = sum(
        earlier % table.stages != later % table.stages
        for (_, earlier), (_, later) in neighbours(table)
    )
    assert table.forward_messages == table.backward_messages == crossing


@given(training())
def test_micro_batches_enter_leave_and_return_at_the_ends_of_the_model(table: Schedule) -> None:
    forward, backward = tick_of(table, table.forward), tick_of(table, table.backward)
    last = global_chunks(table) - 1
    assert visits(table.entering) == {m: forward[m, 0] for m in range(table.micro_batches)}
    assert visits(table.leaving) == {m: backward[m, last] for m in range(table.micro_batches)}
    assert visits(table.returning) == {m: backward[m, 0] for m in range(table.micro_batches)}


def visits(micro_batches: np.ndarray) -> dict[int, int]:
    """The tick of each micro-batch that a column of a table names."""
    ticks = np.flatnonzero(micro_batches != -1).tolist()
    named = micro_batches[ticks].tolist()
    assert len(set(named)) == len(named)
    return dict(zip(named, ticks))


@given(evaluating)
def test_an_evaluation_runs_each_chunk_forward_alone(table: Schedule) -> None:
    forward = tick_of(table, table.forward)
    assert Counter(cell[1:] for cell in units(table.forward)) == everything(table)
    assert all(forward[later] == forward[earlier] + 1 for earlier, later in neighbours(table))
    assert not table.backward.busy.any()
    assert (table.slots, table.live_inputs, table.backward_messages) == (0, 0, 0)


@given(evaluating)
def test_a_micro_batch_leaves_an_evaluation_in_its_last_forward(table: Schedule) -> None:
    forward = tick_of(table, table.forward)
    last = global_chunks(table) - 1
    assert visits(table.leaving) == {m: forward[m, last] for m in range(table.micro_batches)}
    assert visits(table.returning) == {}


@given(st.one_of(training(), evaluating))
def test_tables_are_int32_of_ticks_and_stages_and_cannot_be_written(table: Schedule) -> None:
    for work in (table.forward, table.backward):
        for part in work:
            assert part.shape == (table.ticks, table.stages)
            assert part.dtype == np.int32
            assert not part.flags.writeable
        assert not work.chunk[~work.busy].any()
        assert not work.slot[~work.busy].any()
    for column in (table.entering, table.leaving, table.returning):
        assert column.shape == (table.ticks,)
        assert column.dtype == np.int32


def test_the_last_tick_has_work() -> None:
    table = schedule("1f1b", stages=3, micro_batches=5)
    assert table.backward.busy[-1].any()
    assert table.ticks == 5 + 2 * (3 - 1)


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 5))
def test_interleaved_with_one_chunk_is_1f1b(stages: int, turns: int) -> None:
    one = schedule("interleaved", stages, stages * turns, chunks=1)
    other = schedule("1f1b", stages, stages * turns)
    for direction in ("forward", "backward"):
        for ours, theirs in zip(getattr(one, direction), getattr(other, direction)):
            np.testing.assert_array_equal(ours, theirs)


def test_the_largest_pipelines_have_tables_too() -> None:
    table = schedule("interleaved", stages=64, micro_batches=1024, chunks=8)
    assert table.ticks == 8 * 1024 + 64 - 1 + 8 * 64 - 1
    assert table.slots == 8 * 64 + 64 - 1


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "chunks", "says"),
    [
        ("1f1b", 4, 2, 1, ("gradient_accumulation_steps is 2", "4 stages", "at least 4")),
        ("gpipe", 8, 7, 1, ("gradient_accumulation_steps is 7", "8 stages", "at least 8")),
        ("interleaved", 4, 3, 2, ("gradient_accumulation_steps is 3", "at least 4")),
        ("interleaved", 4, 10, 2, ("gradient_accumulation_steps is 10", "8 or 12", '"1f1b"')),
        ("interleaved", 4, 8, 0, ("pipeline_chunks is 0", "at least 1")),
        ("1f1b", 4, 8, 2, ("pipeline_chunks is 2", "1f1b", '"interleaved"')),
        ("gpipe", 4, 8, 3, ("pipeline_chunks is 3", "gpipe", '"interleaved"')),
        ("pipedream", 4, 8, 1, ("'pipedream'", "gpipe, 1f1b, interleaved")),
    ],
)
def test_an_impossible_schedule_is_refused_with_what_would_work(
    name: str, stages: int, micro_batches: int, chunks: int, says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        schedule(name, stages, micro_batches, chunks)
    for words in says:
        assert words in str(refusal.value)
