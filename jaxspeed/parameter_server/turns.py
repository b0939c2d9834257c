"""Whose turn it is: parts of the data to workers as they come free, pushes in order of arrival.

What drives it asks `begin` for a worker for the next part, and `arrive` for the next push wherever
`begin` had none. Every choice follows from the rule, the paces and the seed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspeed.parameter_server.staleness import Ledger, Push, Rule
from jaxspeed.parameter_server.virtual_clock import Clock


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
