"""Whose push counts, with processes that a test plays: any order of arrival keeps the rules."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.errors import RunError
from jaxspeed.parameter_server import Rule
from jaxspeed.parameter_server.schedules import (
    MAX_CONSECUTIVE_LOSSES,
    AsynchronousSchedule,
    Finished,
    PushLostError,
    SynchronousSchedule,
)
from jaxspeed.traced_loss.accumulate import Sums

WORKERS = 3


class WorkerPool:
    """Workers whose tasks are done in an order that `choose` says."""

    size = WORKERS

    def __init__(self, choose):
        self._choose = choose
        self.tasks = {}
        self.most = 0

    @property
    def in_flight(self):
        return len(self.tasks)

    def start(self, worker, task):
        assert worker not in self.tasks
        self.tasks[worker] = task
        self.most = max(self.most, len(self.tasks))

    def next(self):
        worker = self._choose(sorted(self.tasks))
        return Finished(worker, self.tasks.pop(worker))

    def pull(self, published):
        pass

    def metrics(self):
        return {}

    def discard(self):
        self.tasks.clear()


class Store:
    """What is published is the version; it notes what it was given."""

    buckets = (None,)

    def __init__(self, losses=0, version=0):
        self.version = version
        self.applied = []  # (the version that was pulled, the version that it met, its factor)
        self.tries, self._losses = 0, losses

    def publish(self, bucket=None):
        return self.version

    def losses(self, done):
        return Sums({}, np.float32(done.task.batch), np.float32(1), {})

    def reduce(self, pushes, factor=1.0, bucket=None):
        return [(done, factor) for done, _ in pushes]

    def apply(self, reduced):
        self.tries += 1
        if self.tries <= self._losses:
            raise PushLostError("gone")
        for done, factor in reduced:
            self.applied.append((done.task.published, self.version, factor))
        self.parts = [done.task.part for done, _ in reduced]
        self.version += 1
        return {"grad_norm": np.float32(0)}


@given(
    st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=60),
    st.integers(1, 3),
    st.sampled_from(["wait", "drop"]),
)
def test_no_gradient_older_than_the_bound_is_applied(order, bound, on_stale):
    choices = deque(order)

    def choose(there):
        choices.rotate(-1)
        return there[choices[0] % len(there)]

    workers, servers = WorkerPool(choose), Store()
    schedule = AsynchronousSchedule(workers, servers, Rule(bound, on_stale, 0.5))
    for _ in range(10):
        metrics = schedule.train([1.0] * WORKERS)
        assert metrics["loss"] == 1.0
        assert metrics["staleness_max"] <= bound or on_stale == "drop"
    schedule.drain()
    ages = [met - pulled for pulled, met, _ in servers.applied]
    assert max(ages) <= bound
    assert [share for _, _, share in servers.applied] == [0.5**age for age in ages]
    dropped = sum(n for age, n in schedule.staleness.items() if age > bound)
    assert len(ages) + dropped == 10 * WORKERS
    assert dropped == 0 or on_stale == "drop"


def test_a_slow_worker_sets_the_pace_where_others_wait():
    workers, servers = (
        WorkerPool(lambda there: there[-1]),
        Store(),
    )  # worker 0 is never done first
    schedule = AsynchronousSchedule(workers, servers, Rule(2, "wait"))
    metrics = [schedule.train([1.0] * WORKERS) for _ in range(6)]
    assert sum(one["waited"] for one in metrics) > 0
    assert max(schedule.staleness) == 2


def test_each_call_reports_the_pushes_since_the_last():
    workers, servers = WorkerPool(lambda there: there[0]), Store(version=5)
    schedule = AsynchronousSchedule(workers, servers, Rule(9, "drop"))
    first = schedule.train([1.0, 2.0, 3.0])  # all three are handed out; one is waited for
    assert (first["accepted"], first["loss"], first["version"]) == (1, 1.0, 6)
    second = schedule.train([4.0, 5.0, 6.0])
    assert second["accepted"] == second["version"] - 6 > 0
    schedule.drain()
    assert servers.version == 5 + 6


def test_a_synchronous_step_with_lost_gradients_is_recomputed():
    workers, servers = (
        WorkerPool(lambda there: there[-1]),
        Store(losses=MAX_CONSECUTIVE_LOSSES - 1),
    )
    schedule = SynchronousSchedule(workers, servers)
    assert schedule.train([1.0] * WORKERS)["version"] == 1
    assert servers.tries == MAX_CONSECUTIVE_LOSSES and len(servers.applied) == WORKERS
    assert servers.parts == [0, 1, 2]  # in this order, whatever came first
    schedule = SynchronousSchedule(workers, Store(losses=MAX_CONSECUTIVE_LOSSES))
    with pytest.raises(RunError, match="do not reach the servers"):
        schedule.train([1.0] * WORKERS)


def test_pushes_in_flight_are_discarded_after_an_error():
    workers, servers = WorkerPool(lambda there: there[0]), Store()
    schedule = AsynchronousSchedule(workers, servers, Rule(9, "drop"))
    schedule.train([1.0] * WORKERS)
    assert workers.in_flight
    schedule.abort()
    assert not workers.in_flight
    schedule.train([1.0] * WORKERS)
    assert workers.most == WORKERS
