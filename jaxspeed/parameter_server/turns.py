"""Whose turn it is: parts of the data to workers as they come free, pushes in order of arrival.

What drives it asks `begin` for a worker for the next part, and `arrive` for the next push wherever
`begin` had none. Every choice follows from the rule, the paces and the seed.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspeed.parameter_server.staleness import Ledger, Push, Rule

SPREAD = 0.1  # of a task's time, each way


class Clock:
    """A virtual clock: which worker is done when, as a function of the seed alone.

    On one controller the devices of the workers are driven by one program, so the order in which
    they finish is not an event that could be waited for: it is simulated. A worker's n-th task
    takes its pace times a factor that is drawn uniformly from [0.9, 1.1) by (seed, worker, n). So
    workers of one pace do not march in step, and a run can be replayed. Time passes only by
    `arrive`: from one finished task to the next.
    """

    def __init__(self, paces: Sequence[float], seed: int = 0) -> None:
        self.paces = tuple(paces)  # seconds of a task, by worker
        self.seed = seed
        self.now = 0.0
        self._tasks: Counter[int] = Counter()
        self._done: list[tuple[float, int]] = []  # a heap of (when, worker)

    def begin(self, worker: int) -> float:
        """A worker begins a task now; when it will be done."""
        drawn = np.random.default_rng((self.seed, worker, self._tasks[worker])).random()
        self._tasks[worker] += 1
        done = self.now + self.paces[worker] * (1 + SPREAD * (2 * drawn - 1))
        heapq.heappush(self._done, (done, worker))
        return done

    def arrive(self) -> int:
        """The worker that is done next, which it then is."""
        self.now, worker = heapq.heappop(self._done)
        return worker

    @property
    def busy(self) -> int:
        """How many workers have a task."""
        return len(self._done)


@dataclass(frozen=True)
class Start:
    """A worker pulls a version and begins."""

    worker: int
    version: int


@dataclass(frozen=True)
class Arrival:
    """A worker's push is there."""

    worker: int
    push: Push


class Turns:
    """Workers under a rule of bounded staleness, in virtual time."""

    def __init__(self, rule: Rule, paces: Sequence[float], seed: int, version: int = 0) -> None:
        self.clock = Clock(paces, seed)
        self.ledger = Ledger(rule, version)
        self._free = deque(range(len(paces)))  # who asked first pulls first

    def begin(self) -> Start | None:
        """The next free worker pulls; None where none is free, or the rule makes it wait."""
        if not self._free:
            return None
        version = self.ledger.pull(self._free[0])
        if version is None:
            # The others that are free wait as well: the rule does not look at who asks.
            for worker in list(self._free)[1:]:
                self.ledger.pull(worker)
            return None
        worker = self._free.popleft()
        self.clock.begin(worker)
        return Start(worker, version)

    def arrive(self) -> Arrival | None:
        """The next push; None where nothing is in flight."""
        if not self.clock.busy:
            return None
        worker = self.clock.arrive()
        self._free.append(worker)
        return Arrival(worker, self.ledger.push(worker))


def rounds_seconds(clock: Clock) -> float:
    """One round in virtual time: all workers begin, and the last to arrive ends it; its seconds."""
    begun = clock.now
    for worker in range(len(clock.paces)):
        clock.begin(worker)
    while clock.busy:
        clock.arrive()
    return clock.now - begun
