"""Whose push counts, with processes that a test plays: any order of arrival keeps the rules."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.errors import RunError
from jaxspeed.parameter_server import Rule
from jaxspeed.parameter_server.ray.failures import PushLostError
from jaxspeed.parameter_server.ray.ray_turns import LOST_IN_A_ROW, OwnPace, Rounds
from jaxspeed.parameter_server.ray.server_functions import Told
from jaxspeed.parameter_server.ray.worker_pool import Done

WORKERS = 3


class Crew:
    """Workers whose tasks are done in an order that `choose` says."""

    size = WORKERS

    def __init__(self, choose):
        self._choose = choose
        self.tasks = {}
        self.most = 0

    @property
    def under_way(self):
        return len(self.tasks)

    def start(self, worker, task):
        assert worker not in self.tasks
        self.tasks[worker] = task
        self.most = max(self.most, len(self.tasks))

    def next(self):
        worker = self._choose(sorted(self.tasks))
        task = self.tasks.pop(worker)
        told = Told(np.float32(task.batch), np.float32(1), {}, np.float32(1))
        return Done(worker, task, told, pushes=[task])

    def forget(self):
        self.tasks.clear()


class Servers:
    """What is published is the version; it notes what it was given."""

    def __init__(self, losses=0):
        self.published = [0]
        self.applied = []  # (the version that was pulled, the version that it met, its share)
        self.tries, self._losses = 0, losses

    def update(self, pushes, shares, told):
        self.tries += 1
        if self.tries <= self._losses:
            raise PushLostError("gone")
        version = self.published[0]
        for (task,), share in zip(pushes, shares, strict=True):
            self.applied.append((task.published[0], version, float(share)))
        self.published = [version + 1]
        return {"grad_norm": np.float32(0)}


@given(
    st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=60),
    st.integers(1, 3),
    st.sampled_from(["wait", "drop"]),
)
def test_no_gradient_older_than_the_bound_is_applied(order, bound, on_stale):
    turns = deque(order)

    def choose(there):
        turns.rotate(-1)
        return there[turns[0] % len(there)]

    crew, servers = Crew(choose), Servers()
    way = OwnPace(crew, servers, Rule(bound, on_stale, 0.5), version=0)
    for _ in range(10):
        metrics = way.train([1.0] * WORKERS)
        assert metrics["loss"] == 1.0
        assert metrics["staleness_max"] <= bound or on_stale == "drop"
    way.drain()
    ages = [met - pulled for pulled, met, _ in servers.applied]
    assert max(ages) <= bound
    assert [share for _, _, share in servers.applied] == [0.5**age for age in ages]
    dropped = sum(n for age, n in way.staleness.items() if age > bound)
    assert len(ages) + dropped == 10 * WORKERS
    assert dropped == 0 or on_stale == "drop"


def test_a_slow_worker_sets_the_pace_where_others_wait():
    crew, servers = Crew(lambda there: there[-1]), Servers()  # worker 0 is never done first
    way = OwnPace(crew, servers, Rule(2, "wait"), version=0)
    metrics = [way.train([1.0] * WORKERS) for _ in range(6)]
    assert sum(one["waited"] for one in metrics) > 0
    assert max(way.staleness) == 2


def test_each_call_tells_of_the_pushes_since_the_one_before():
    crew, servers = Crew(lambda there: there[0]), Servers()
    way = OwnPace(crew, servers, Rule(9, "drop"), version=5)
    first = way.train([1.0, 2.0, 3.0])  # all three are handed out; one is waited for
    assert (first["accepted"], first["loss"], first["version"]) == (1, 1.0, 6)
    second = way.train([4.0, 5.0, 6.0])
    assert second["accepted"] == second["version"] - 6 > 0
    way.drain()
    assert servers.published == [6]


def test_a_round_whose_gradients_are_lost_on_the_way_is_computed_again():
    crew, servers = Crew(lambda there: there[-1]), Servers(losses=LOST_IN_A_ROW - 1)
    way = Rounds(crew, servers, version=0)
    assert way.train([1.0] * WORKERS)["version"] == 1
    assert servers.tries == LOST_IN_A_ROW and len(servers.applied) == WORKERS
    # In the order of the parts, whatever came first.
    way = Rounds(crew, Servers(losses=LOST_IN_A_ROW), version=0)
    with pytest.raises(RunError, match="do not reach the servers"):
        way.train([1.0] * WORKERS)


def test_what_was_under_way_is_given_up_after_an_error():
    crew, servers = Crew(lambda there: there[0]), Servers()
    way = OwnPace(crew, servers, Rule(9, "drop"), version=0)
    way.train([1.0] * WORKERS)
    assert crew.under_way
    way.give_up()
    assert not crew.under_way
    way.train([1.0] * WORKERS)
    assert crew.most == WORKERS
