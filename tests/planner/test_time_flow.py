"""Overlap of communication with operations that do not depend on it."""

import jax
import pytest

from jaxspeed.planner.time.overlap import UNITS, TimedTask, schedule_scope
from jaxspeed.planner.trace.trace_ir import Op, Scope, Value

pytestmark = pytest.mark.fast


def value():
    return Value(jax.ShapeDtypeStruct((8,), "float32"))


def op(ins, outs):
    return Op("op", {}, ins, outs)


A, B, C, D = (value() for _ in range(4))


def test_communication_overlaps_with_independent_work():
    ops = [op([], [A]), op([], [B]), op([A, B], [C])]
    tasks = [[TimedTask("links", 2.0)], [TimedTask(UNITS, 3.0)], [TimedTask(UNITS, 1.0)]]
    found = schedule_scope(Scope([], [C], ops), tasks)
    assert found.seconds == pytest.approx(4.0)
    assert sum(found.waited.values()) == 0


def test_an_operation_waits_for_the_communication_that_it_reads():
    ops = [op([], [A]), op([], [B]), op([A, B], [C])]
    tasks = [[TimedTask("links", 5.0)], [TimedTask(UNITS, 3.0)], [TimedTask(UNITS, 1.0)]]
    found = schedule_scope(Scope([], [C], ops), tasks)
    assert found.seconds == pytest.approx(6.0)
    assert found.waited == {0: pytest.approx(2.0)}


def test_ready_work_overtakes_work_that_waits():
    ops = [op([], [A]), op([A], [B]), op([], [C]), op([B, C], [D])]
    tasks = [[TimedTask("links", 3.0)], [TimedTask(UNITS, 1.0)], [TimedTask(UNITS, 3.0)], []]
    assert schedule_scope(Scope([], [D], ops), tasks).seconds == pytest.approx(4.0)


def test_communications_are_serialized_per_link():
    ops = [op([], [A]), op([], [B]), op([A, B], [C])]
    same = [[TimedTask("links", 2.0)], [TimedTask("links", 2.0)], [TimedTask(UNITS, 1.0)]]
    apart = [[TimedTask("links", 2.0)], [TimedTask("network", 2.0)], [TimedTask(UNITS, 1.0)]]
    assert schedule_scope(Scope([], [C], ops), same).seconds == pytest.approx(5.0)
    found = schedule_scope(Scope([], [C], ops), apart)
    assert found.seconds == pytest.approx(3.0)
    assert found.waited == {0: pytest.approx(1.0), 1: pytest.approx(1.0)}


def test_what_is_sent_a_trip_ahead_is_awaited_only_at_the_end():
    ops = [op([], [A]), op([A], [B])]
    tasks = [[TimedTask(UNITS, 0.0)], [TimedTask(UNITS, 3.0)]]
    found = schedule_scope(Scope([], [B], ops), tasks, {0: [TimedTask("host", 2.0)]})
    assert found.seconds == pytest.approx(3.0) and sum(found.waited.values()) == 0
    gathered = [[TimedTask("links", 1.0)], [TimedTask(UNITS, 3.0)]]
    found = schedule_scope(Scope([], [B], ops), gathered, {1: [TimedTask("host", 2.0)]})
    assert found.waited == {0: pytest.approx(1.0)}, "the units wait for the gather alone"
    found = schedule_scope(Scope([], [B], ops), tasks, {0: [TimedTask("host", 5.0)]})
    assert found.seconds == pytest.approx(5.0) and found.waited == {0: pytest.approx(2.0)}


def test_a_sum_is_sent_after_its_work():
    ops = [op([], [A]), op([A], [B])]
    tasks = [[TimedTask(UNITS, 1.0), TimedTask("links", 2.0)], [TimedTask(UNITS, 1.0)]]
    found = schedule_scope(Scope([], [B], ops), tasks)
    assert found.seconds == pytest.approx(4.0)
    assert found.waited == {0: pytest.approx(2.0)}
