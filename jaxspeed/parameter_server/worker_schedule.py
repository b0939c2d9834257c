"""Simulated order of asynchronous workers: a virtual clock, and parts for free workers.

The caller asks `begin` for a worker for the next part, and `arrive` for the next push where none is
free. Every choice follows from the rule, the paces and the seed.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspeed.parameter_server.staleness import Ledger, Push, Rule

SPREAD = 0.1  # of a task's time, in each direction


class VirtualClock:
    """A virtual clock: when each worker finishes, as a function of the seed alone.

    On one controller the devices of the workers are driven by one program, so the order in which
    they finish is no observable event: it is simulated. A worker's n-th task takes its pace times a
    factor that is drawn uniformly from [0.9, 1.1) by (seed, worker, n). So workers of one pace do
    not run in lockstep, and a run can be replayed. Time advances only by `arrive`: from one
    finished task to the next.
    """

    def __init__(self, paces: Sequence[float], seed: int = 0) -> None:
        self.paces = tuple(paces)  # seconds of a task, by worker
        self.seed = seed
        self.now = 0.0
        self._tasks: Counter[int] = Counter()
        self._done: list[tuple[float, int]] = []  # a heap of (when, worker)

    def begin(self, worker: int) -> float:
        """Start a task of a worker; return when it will finish."""
        drawn = np.random.default_rng((self.seed, worker, self._tasks[worker])).random()
        self._tasks[worker] += 1
        done = self.now + self.paces[worker] * (1 + SPREAD * (2 * drawn - 1))
        heapq.heappush(self._done, (done, worker))
        return done

    def arrive(self) -> int:
        """Advance to the next finished task; return its worker."""
        self.now, worker = heapq.heappop(self._done)
        return worker

    @property
    def busy(self) -> int:
        """The number of workers that have a task."""
        return len(self._done)


@dataclass(frozen=True)
class Start:
    """A worker that pulled a version and starts."""

    worker: int
    version: int


@dataclass(frozen=True)
class Arrival:
    """The arrival of a worker's push."""

    worker: int
    push: Push


class WorkerSchedule:
    """Workers under a rule of bounded staleness, in virtual time."""

    def __init__(self, rule: Rule, paces: Sequence[float], seed: int, version: int = 0) -> None:
        self.clock = VirtualClock(paces, seed)
        self.ledger = Ledger(rule, version)
        self._free = deque(range(len(paces)))  # first in, first out

    def begin(self) -> Start | None:
        """Let the next free worker pull; None where none is free, or the rule makes it wait."""
        if not self._free:
            return None
        version = self.ledger.pull(self._free[0])
        if version is None:
            # The other free workers wait as well: the rule is the same for all.
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


def synchronous_step_seconds(clock: VirtualClock) -> float:
    """Virtual seconds of one synchronous step: all workers start, the last arrival ends it."""
    begun = clock.now
    for worker in range(len(clock.paces)):
        clock.begin(worker)
    while clock.busy:
        clock.arrive()
    return clock.now - begun
