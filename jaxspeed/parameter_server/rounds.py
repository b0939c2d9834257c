"""By rounds: every worker computes on one version, and their mean makes the next.

Pushes arrive in the clock's order and are summed in worker order, so that the order of arrival
changes no number: one that comes early waits for those before it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxspeed.objective.accumulate import Sums
from jaxspeed.parameter_server.bucketed_update import Buckets, UpdateByBuckets
from jaxspeed.parameter_server.service import Service
from jaxspeed.parameter_server.turns import Clock
from jaxspeed.train.program import Metrics


class Rounds:
    """In step, or `max_staleness: 0`: no push has an age."""

    def __init__(self, service: Service) -> None:
        self.service = service
        program = service.program
        self.clock = Clock(program.paces, program.config.run.seed)
        self.staleness: Counter[int] = Counter()

    def train(self, parts: list[Any]) -> Metrics:
        """One version from all parts, the i-th by worker i."""
        service, buckets = self.service, self.service.program.buckets
        if buckets is None:
            metrics = service.apply(self.summed(parts))
            for worker in range(len(parts)):  # side by side
                service.pull(worker)
        else:
            metrics = self._by_buckets(buckets, self._computed(parts))
        self.staleness[0] += len(parts)
        told = {"version": service.version, "virtual_seconds": self.clock.now}
        return {**metrics, **{name: service.number(value) for name, value in told.items()}}

    def summed(self, parts: list[Any]) -> Sums:
        """The weighted mean of all gradients, on the servers."""
        return self._folded(self._computed(parts), self.service.fleet.push)

    def _computed(self, parts: list[Any]) -> list[int]:
        """All workers compute; they, in the order in which they are done."""
        for worker, part in enumerate(parts):
            self.service.pull(worker)
            self.service.compute(worker, part)
            self.clock.begin(worker)
        return [self.clock.arrive() for _ in parts]

    def _folded(self, arriving: list[int], push: Callable[[int], Sums]) -> Sums:
        """The weighted mean of what is pushed as workers arrive, in their own order."""
        early: dict[int, Sums] = {}
        sums: Sums | None = None
        following = 0
        for worker in arriving:
            early[worker] = push(worker)
            while following in early:
                own = early.pop(following)
                sums = own if sums is None else self.service.program.fold(sums, own)
                following += 1
        assert sums is not None
        return sums

    def _by_buckets(self, buckets: Buckets, arriving: list[int]) -> Metrics:
        """Each bucket is updated and pulled before the next is pushed."""
        service, fleet = self.service, self.service.fleet
        weights = {worker: fleet.push_scalars(worker) for worker in arriving}
        update = UpdateByBuckets(buckets, service.state)
        for paths in buckets.paths:

            def push(worker: int, paths: Sequence[str] = paths) -> Sums:
                return weights[worker]._replace(grads=fleet.push_gradients(worker, paths))

            sums = self._folded(arriving, push)
            published = update.bucket({path: sums.grads[path] for path in paths})
            for worker in arriving:
                fleet.pull_some(worker, published)
            service.pace.sent(published[paths[0]])
        state, metrics = update.finish(sums._replace(grads={}))
        service.advance(state)
        for worker in arriving:
            fleet.pushed(worker)
            service.has_pulled(worker)
        return metrics

    def drain(self) -> None:
        """Nothing is under way between two rounds."""
