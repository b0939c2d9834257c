"""Every second of a run is booked once."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.metrics import NAMES, PHASES, TimeLedger
from jaxspeed.placement.show import as_text

pytestmark = pytest.mark.fast


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def booked(ledger):
    return {name: value for name, value in ledger.seconds().items() if value}


def test_seconds_are_booked_to_the_phase_in_which_they_pass(clock):
    ledger = TimeLedger(clock=clock)
    clock.now += 1
    for _ in range(3):
        with ledger.phase("data"):
            clock.now += 2
        with ledger.phase("compute"):
            clock.now += 10
    assert booked(ledger) == {"other": 1, "data": 6, "compute": 30}


def test_a_phase_within_a_phase_is_booked_once(clock):
    ledger = TimeLedger(clock=clock)
    with ledger.phase("evaluate"):
        clock.now += 1
        with ledger.phase("compile"):
            clock.now += 20
        clock.now += 2
    assert booked(ledger) == {"evaluate": 3, "compile": 20}


def test_a_phase_ends_when_it_raises(clock):
    ledger = TimeLedger(clock=clock)
    with pytest.raises(KeyboardInterrupt), ledger.phase("compute"):
        clock.now += 4
        raise KeyboardInterrupt
    clock.now += 1
    assert booked(ledger) == {"compute": 4, "other": 1}


def test_an_open_phase_is_counted_up_to_now(clock):
    ledger = TimeLedger(clock=clock)
    with ledger.phase("checkpoint"):
        clock.now += 3
        assert booked(ledger) == {"checkpoint": 3}
        clock.now += 1
    assert booked(ledger) == {"checkpoint": 4}


def test_after_a_restart_the_seconds_go_on(clock):
    first = TimeLedger(clock=clock)
    with first.phase("compute"):
        clock.now += 50
    clock.now += 999  # no process was there
    second = TimeLedger(carried=first.as_record() | {"wall/other": 0.0}, clock=clock)
    with second.phase("restart"):
        clock.now += 5
    assert booked(second) == {"compute": 50, "restart": 5}
    assert second.as_record()["wall/total"] == 55


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e6)), max_size=30))
def test_the_phases_sum_to_the_wall_time(visits):
    clock = Clock()
    ledger = TimeLedger(clock=clock)
    for name, seconds in visits:
        with ledger.phase(name):
            clock.now += seconds
    record = ledger.as_record()
    assert record["wall/total"] == pytest.approx(clock.now - 1000)
    assert record["wall/total"] == pytest.approx(sum(record[f"wall/{name}"] for name in PHASES))


def test_real_time_is_booked():
    ledger, start = TimeLedger(), time.perf_counter()
    with ledger.phase("data"):
        time.sleep(0.05)
    seconds = ledger.seconds()
    assert 0.05 <= seconds["data"] <= sum(seconds.values()) <= time.perf_counter() - start + 0.01


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="unknown phase 'compiling': known are compile, data"):
        TimeLedger().phase("compiling").__enter__()


def test_its_record_is_among_the_named_metrics():
    assert set(TimeLedger().as_record()) <= set(NAMES)


def test_people_see_the_longest_first_and_each_share(clock):
    ledger = TimeLedger(clock=clock)
    with ledger.phase("compile"):
        clock.now += 25
    with ledger.phase("compute"):
        clock.now += 3600
    with ledger.phase("data"):
        clock.now += 0.001
    lines = [line.split() for line in as_text(ledger.table(), width=80).splitlines()]
    assert [words[0] for words in lines[2:]] == ["compute", "compile", "wall"]
    assert lines[2][1:4] == ["1:00:00", "99.3", "%"]
    assert lines[3][1:5] == ["25.0", "s", "0.7", "%"]
    assert lines[4][2] == "1:00:25"
