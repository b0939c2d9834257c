"""The chart of a schedule: it shows what the table says, in the columns that there are."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.pipeline.gantt import gantt
from jaxspeed.pipeline.schedule import Schedule, forward_only, schedule

pytestmark = pytest.mark.fast


@st.composite
def drawn(draw: st.DrawFn) -> Schedule:
    stages, turns, chunks = (draw(st.integers(1, most)) for most in (12, 12, 5))
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "forward"]))
    if name == "forward":
        return forward_only(stages, turns, chunks)
    return schedule(name, stages, stages * turns, chunks if name == "interleaved" else 1)


def chart(text: str) -> list[str]:
    """The ruler and the rows, without what stands above and below."""
    return text.split("\n\n")[1].splitlines()


def rows(text: str) -> list[str]:
    return [re.sub(r"^(stage +\d+)? *[FB] ", "", line) for line in chart(text)[1:]]


def test_1f1b_drawn_in_full() -> None:
    assert gantt(schedule("1f1b", stages=3, micro_batches=5)) == "\n".join(
        [
            "1f1b: 3 stages, 5 micro-batches, 9 ticks, bubble 28.6%, 5 live inputs",
            "",
            "tick       0         5",
            "stage 0 F  0 1 2 3 4 · ·",
            "        B      · · 0 1 2 3 4",
            "stage 1 F  · 0 1 2 3 4 ·",
            "        B      · 0 1 2 3 4 ·",
            "stage 2 F  · · 0 1 2 3 4",
            "        B      0 1 2 3 4 · ·",
            "",
            "F forward, B backward, · idle",
        ]
    )


def test_an_interleaved_row_says_where_a_chunk_begins() -> None:
    assert gantt(schedule("interleaved", stages=2, micro_batches=4, chunks=2), 100) == "\n".join(
        [
            "interleaved: 2 stages of 2 chunks, 4 micro-batches, 12 ticks, bubble 11.1%, "
            "5 live inputs",
            "",
            "tick       0         5        10",
            "stage 0 F a0 1b0 1a2 3b2 3 ·",
            "        B        ·b0 1a0 1b2 3a2 3",
            "stage 1 F  ·a0 1b0 1a2 3b2 3",
            "        B       b0 1a0 1b2 3a2 3 ·",
            "",
            "F forward, B backward, · idle, a to b the chunks of a stage",
        ]
    )


def test_the_middle_of_a_long_schedule_is_omitted_and_counted() -> None:
    assert gantt(schedule("1f1b", stages=2, micro_batches=100), width=40) == "\n".join(
        [
            "1f1b: 2 stages, 100 micro-batches,",
            "102 ticks, bubble 1.0%, 3 live inputs",
            "",
            "tick        0          ...       100",
            "stage 0 F   0  1  2  3 ...  98 99  ·",
            "        B      ·  0  1 ...  96 97 98 99",
            "stage 1 F   ·  0  1  2 ...  97 98 99",
            "        B      0  1  2 ...  97 98 99  ·",
            "",
            "F forward, B backward, · idle,",
            "... 94 ticks omitted",
        ]
    )


def test_an_evaluation_has_no_backward_rows() -> None:
    assert gantt(forward_only(stages=2, micro_batches=3)) == "\n".join(
        [
            "forward: 2 stages, 3 micro-batches, 4 ticks, bubble 25.0%",
            "",
            "tick       0",
            "stage 0 F  0 1 2 ·",
            "stage 1 F  · 0 1 2",
            "",
            "F forward, · idle",
        ]
    )


@given(drawn(), st.integers(40, 130))
def test_no_line_is_wider_than_asked(table: Schedule, width: int) -> None:
    assert max(map(len, gantt(table, width).splitlines())) <= width


@given(drawn())
def test_the_dots_of_a_full_chart_are_the_bubble(table: Schedule) -> None:
    cells = "".join(rows(gantt(table, width=10_000)))
    idle = cells.count("·")
    busy = len(re.findall(r"\d+", cells))
    assert idle / (idle + busy) == table.bubble


@given(drawn())
def test_a_number_on_the_ruler_ends_above_its_tick(table: Schedule) -> None:
    ruler, first, *_ = chart(gantt(table, width=10_000))
    for number in re.finditer(r"\d+", ruler):
        tick = int(number.group())
        micro = table.forward.micro[tick, 0]
        if micro >= 0:
            assert first[: number.end()].endswith(str(micro))


@given(st.integers(1, 9), st.integers(100, 300), st.integers(1, 3), st.integers(40, 130))
def test_shown_and_omitted_ticks_are_all_ticks(
    stages: int, micro_batches: int, chunks: int, width: int
) -> None:
    table = forward_only(stages, micro_batches, chunks)
    text = gantt(table, width)
    left_out = int(re.findall(r"\.\.\. (\d+) ticks omitted", text)[0])
    for row in rows(text):
        assert len(re.findall(r"\d+|·", row)) + left_out == table.ticks


def test_both_ends_of_a_long_schedule_are_shown() -> None:
    first = rows(gantt(forward_only(stages=1, micro_batches=500), width=60))[0]
    shown = [int(number) for number in re.findall(r"\d+", first)]
    assert shown[0] == 0
    assert shown[-1] == 499
    assert len(shown) == (60 - 10 - 5) // 4
