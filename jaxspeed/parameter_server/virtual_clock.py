"""A virtual clock: which worker is done when, as a function of the seed alone.

On one controller the devices of the workers are driven by one program, so the order in which they
finish is not an event that could be waited for: it is simulated. A worker's n-th task takes its
pace times a factor that is drawn uniformly from [0.9, 1.1) by (seed, worker, n). So workers of one
pace do not march in step, and a run can be replayed.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

SPREAD = 0.1  # of a task's time, each way


class Clock:
    """Time passes only by `arrive`: from one finished task to the next."""

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
