"""Simulated order of asynchronous workers, as a function of the seed."""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspeed.parameter_server.schedules import Finished

SPREAD = 0.1  # of a task's time, in each direction


class VirtualClock:
    """A virtual clock: when each worker finishes, as a function of the seed alone.

    On one controller the devices of the workers are driven by one program, so the order in which
    they finish is no observable event: it is simulated. A worker's n-th task takes its pace times a
    factor that is drawn uniformly from [0.9, 1.1) by (seed, worker, n). So workers of one pace do
    not run in lockstep, and a run can be replayed. Time advances only by `next`: from one finished
    task to the next.
    """

    def __init__(self, paces: Sequence[float], seed: int = 0) -> None:
        self.paces = tuple(paces)  # seconds of a task, by worker
        self.seed = seed
        self.now = 0.0
        self._tasks: Counter[int] = Counter()
        self._done: list[tuple[float, int]] = []  # a heap of (when, worker)

    @property
    def size(self) -> int:
        return len(self.paces)

    def start(self, worker: int, task: Any = None) -> None:
        """Start a task of a worker."""
        drawn = np.random.default_rng((self.seed, worker, self._tasks[worker])).random()
        self._tasks[worker] += 1
        done = self.now + self.paces[worker] * (1 + SPREAD * (2 * drawn - 1))
        heapq.heappush(self._done, (done, worker))

    def next(self) -> Finished:
        """Advance to the next finished task."""
        self.now, worker = heapq.heappop(self._done)
        return Finished(worker)

    def discard(self) -> None:
        """Forget the tasks that are not finished."""
        self._done.clear()

    @property
    def in_flight(self) -> int:
        """The number of workers that have a task."""
        return len(self._done)


def synchronous_step_seconds(clock: VirtualClock) -> float:
    """Virtual seconds of one synchronous step: all workers start, the last arrival ends it."""
    begun = clock.now
    for worker in range(clock.size):
        clock.start(worker)
    while clock.in_flight:
        clock.next()
    return clock.now - begun
