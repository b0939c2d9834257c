"""By rounds: every worker computes on one version, and their mean makes the next.

Pushes arrive in the clock's order and are summed in worker order, so that the order of arrival
changes no number: one that comes early waits for those before it.
"""

from collections import Counter
from typing import Any

from jaxspeed.parallel.server import Clock
from jaxspeed.train.pipeline import Sums
from jaxspeed.train.program import Metrics
from jaxspeed.train.served.service import Service


class Rounds:
    """In step, or `max_staleness: 0`: no push has an age."""

    def __init__(self, service: Service) -> None:
        self.service = service
        program = service.program
        self.clock = Clock(program.paces, program.config.run.seed)
        self.staleness: Counter[int] = Counter()

    def train(self, parts: list[Any]) -> Metrics:
        """One version from all parts, the i-th by worker i."""
        service = self.service
        metrics = service.apply(self.summed(parts))
        for worker in range(len(parts)):  # side by side, while the controller does other things
            service.pull(worker)
        self.staleness[0] += len(parts)
        told = {"version": service.version, "virtual_seconds": self.clock.now}
        return {**metrics, **{name: service.number(value) for name, value in told.items()}}

    def summed(self, parts: list[Any]) -> Sums:
        """The weighted mean of all gradients, on the servers."""
        service, fleet = self.service, self.service.fleet
        for worker, part in enumerate(parts):
            service.pull(worker)
            service.compute(worker, part)
            self.clock.begin(worker)
        early: dict[int, Sums] = {}
        sums: Sums | None = None
        following = 0
        while self.clock.busy:
            worker = self.clock.arrive()
            early[worker] = fleet.push(worker)
            while following in early:
                own = early.pop(following)
                sums = own if sums is None else service.program.fold(sums, own)
                following += 1
        assert sums is not None
        return sums

    def drain(self) -> None:
        """Nothing is under way between two rounds."""
