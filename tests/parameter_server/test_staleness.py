"""Bounded staleness: what the ledger and the schedule promise, recounted by the test itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.parameter_server import Ledger, Rule, VirtualClock, WorkerSchedule
from jaxspeed.parameter_server.virtual_clock import synchronous_step_seconds

SLOWED = (1.0, 1.0, 1.0, 5.0)

rules = st.builds(
    Rule,
    max_staleness=st.integers(1, 12),
    on_stale=st.sampled_from(["drop", "wait"]),
    decay=st.sampled_from([1.0, 0.5]),
)


def applied(schedule: WorkerSchedule, steps: int) -> list[int]:
    """Drive the schedule; the age of each applied push, counted here and not by the ledger.

    As long as there are `steps` events, starts and arrivals together.
    """
    pulled: dict[int, int] = {}  # how many pushes had been applied at each worker's pull
    ages: list[int] = []
    for _ in range(steps):
        worker = schedule.begin()
        if worker is not None:
            assert worker not in pulled
            pulled[worker] = len(ages)
            continue
        arrival = schedule.arrive()
        assert arrival is not None, "nobody may begin and nobody is in flight"
        done, push = arrival
        age = len(ages) - pulled.pop(done.worker)
        assert age == push.staleness
        if push.accepted:
            ages.append(age)
    return ages


def seconds_a_push(rule: Rule, paces: tuple[float, ...], pushes: int = 400) -> float:
    """Virtual seconds an accepted push, from first to last."""
    clock = VirtualClock(paces, seed=0)
    schedule = WorkerSchedule(rule, clock)
    while schedule.ledger.accepted < pushes:
        if schedule.begin() is None:
            schedule.arrive()
    return clock.now / pushes


@settings(max_examples=12, deadline=None)
@given(rules, st.lists(st.floats(0.05, 20), min_size=1, max_size=8), st.integers(0, 2**31))
def test_no_gradient_older_than_the_bound_is_applied_in_ten_thousand_steps(
    rule: Rule, paces: list[float], seed: int
) -> None:
    schedule = WorkerSchedule(rule, VirtualClock(paces, seed))
    ages = applied(schedule, 10_000)
    assert rule.max_staleness is not None
    assert max(ages) <= rule.max_staleness
    assert schedule.ledger.accepted == len(ages) == schedule.ledger.version


@settings(max_examples=12, deadline=None)
@given(rules, st.integers(1, 8), st.data())
def test_the_bound_holds_in_any_order_of_arrival(rule: Rule, workers: int, data: st.DataObject):
    """Not only in those that a clock makes; workers die as well."""
    ledger = Ledger(rule)
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    pulled: dict[int, int] = {}
    made = 0
    for _ in range(10_000):
        worker = int(random.integers(workers))
        if worker not in pulled:
            if ledger.pull(worker) is not None:
                pulled[worker] = made
        elif random.random() < 0.02:
            ledger.lost(worker)
            del pulled[worker]
        else:
            push = ledger.push(worker)
            age = made - pulled.pop(worker)
            assert rule.max_staleness is not None
            assert push.accepted == (age <= rule.max_staleness)
            assert push.accepted or rule.on_stale == "drop"
            made += push.accepted
    assert made > 1000


@settings(max_examples=30, deadline=None)
@given(rules, st.integers(1, 6), st.integers(0, 2**31))
def test_a_waiting_worker_may_pull_once_all_pushes_in_flight_arrived(
    rule: Rule, workers: int, seed: int
) -> None:
    schedule = WorkerSchedule(rule, VirtualClock([1.0] * workers, seed))
    applied(schedule, 100)
    while schedule.arrive() is not None:
        pass
    assert schedule.begin() is not None


def test_with_wait_the_slow_worker_sets_the_pace_after_s_versions() -> None:
    s = 4
    schedule = WorkerSchedule(Rule(s, "wait"), VirtualClock(SLOWED, seed=1))
    slow, versions_at = 3, []
    while len(versions_at) < 50:
        if schedule.begin() is None:
            arrival = schedule.arrive()
            assert arrival is not None
            if arrival[0].worker == slow:
                versions_at.append(schedule.ledger.version)
    # While the slow worker computes, the others make s versions and then wait for it.
    assert set(np.diff(versions_at)) == {s + 1}
    assert schedule.ledger.waited > 0 and schedule.ledger.dropped == 0
    a_cycle = (s + 1) * seconds_a_push(Rule(s, "wait"), SLOWED)
    assert a_cycle == pytest.approx(5.0, rel=0.05)


def test_with_drop_a_slow_worker_does_not_delay_the_others() -> None:
    """At least twice the accepted pushes a second of rounds, where each waits for the slow one."""
    clock = VirtualClock(SLOWED)
    rounds = 100
    synchronous = sum(synchronous_step_seconds(clock) for _ in range(rounds)) / (
        rounds * len(SLOWED)
    )
    assert synchronous >= 2 * seconds_a_push(Rule(4, "drop"), SLOWED)


def test_without_a_slow_worker_no_push_is_dropped_and_no_pull_waits() -> None:
    for on_stale in ("drop", "wait"):
        schedule = WorkerSchedule(Rule(12, on_stale), VirtualClock([1.0] * 4, seed=0))
        applied(schedule, 1000)
        assert (schedule.ledger.dropped, schedule.ledger.waited) == (0, 0)
        assert set(schedule.ledger.staleness) <= set(range(7))


def test_wait_allows_at_most_s_plus_one_pushes_in_flight() -> None:
    schedule = WorkerSchedule(Rule(2, "wait"), VirtualClock([1.0] * 6, seed=0))
    starts = 0
    while schedule.begin() is not None:
        starts += 1
    assert starts == 3


def test_a_lost_worker_blocks_no_pull() -> None:
    ledger = Ledger(Rule(1, "wait"))
    assert ledger.pull("a") == 0 and ledger.pull("b") == 0
    assert ledger.pull("c") is None
    ledger.lost("a")
    assert ledger.pull("c") == 0
    assert ledger.waited == 1


def test_a_push_is_damped_by_its_staleness() -> None:
    ledger = Ledger(Rule(2, "drop", decay=0.5))
    for worker in range(4):
        ledger.pull(worker)
    pushes = [ledger.push(worker) for worker in range(4)]
    assert [p.factor for p in pushes] == [1.0, 0.5, 0.25, 0.0]
    assert [p.accepted for p in pushes] == [True, True, True, False]
    assert ledger.staleness == {0: 1, 1: 1, 2: 1, 3: 1}
    assert (ledger.accepted, ledger.dropped, ledger.version) == (3, 1, 3)


def test_the_seed_alone_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        schedule = WorkerSchedule(Rule(3, "drop"), VirtualClock([1.0] * 4, seed))
        workers = []
        for _ in range(200):
            if (worker := schedule.begin()) is None:
                arrival = schedule.arrive()
                assert arrival is not None
                worker = arrival[0].worker
            workers.append(worker)
        return workers

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_a_synchronous_step_takes_as_long_as_its_slowest_worker() -> None:
    clock = VirtualClock((1.0, 3.0), seed=2)
    taken = [synchronous_step_seconds(clock) for _ in range(200)]
    assert all(2.7 <= seconds < 3.3 for seconds in taken)
    assert np.mean(taken) == pytest.approx(3.0, rel=0.02)
    assert clock.now == pytest.approx(sum(taken))


def test_synchronous_servers_need_no_ledger() -> None:
    assert Rule(None).synchronous and Rule(0).synchronous and not Rule(1).synchronous
    with pytest.raises(ValueError, match="needs no ledger: every push has staleness 0"):
        Ledger(Rule(0))
