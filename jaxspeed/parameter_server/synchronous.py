"""Synchronous workers: all compute on one version, and the mean of their pushes makes the next.

Pushes arrive in the clock's order and are summed in worker order, so that the order of arrival
changes no number: an early one is held until those before it have arrived.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxspeed.objective.accumulate import Sums
from jaxspeed.parameter_server.bucketed_update import BucketedUpdate, UpdateBuckets
from jaxspeed.parameter_server.server import ParameterServer
from jaxspeed.parameter_server.worker_schedule import VirtualClock
from jaxspeed.train.program import Metrics


class SynchronousSchedule:
    """Synchronous steps, also for `max_staleness: 0`: every push has staleness 0."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        program = server.program
        self.clock = VirtualClock(program.paces, program.config.run.seed)
        self.staleness: Counter[int] = Counter()

    def train(self, parts: list[Any]) -> Metrics:
        """One version from all parts, the i-th by worker i."""
        server, buckets = self.server, self.server.program.buckets
        if buckets is None:
            metrics = server.apply(self.summed(parts))
            for worker in range(len(parts)):  # concurrently
                server.pull(worker)
        else:
            metrics = self._by_buckets(buckets, self._computed(parts))
        self.staleness[0] += len(parts)
        extra = {"version": server.version, "virtual_seconds": self.clock.now}
        return {**metrics, **{name: server.number(value) for name, value in extra.items()}}

    def summed(self, parts: list[Any]) -> Sums:
        """The weighted mean of all gradients, on the servers."""
        return self._folded(self._computed(parts), self.server.workers.push)

    def _computed(self, parts: list[Any]) -> list[int]:
        """Dispatch all workers; return them in the order in which they finish."""
        for worker, part in enumerate(parts):
            self.server.pull(worker)
            self.server.compute(worker, part)
            self.clock.begin(worker)
        return [self.clock.arrive() for _ in parts]

    def _folded(self, arriving: list[int], push: Callable[[int], Sums]) -> Sums:
        """The weighted mean of the pushes of arriving workers, in worker order."""
        early: dict[int, Sums] = {}
        sums: Sums | None = None
        following = 0
        for worker in arriving:
            early[worker] = push(worker)
            while following in early:
                own = early.pop(following)
                sums = own if sums is None else self.server.program.fold(sums, own)
                following += 1
        assert sums is not None
        return sums

    def _by_buckets(self, buckets: UpdateBuckets, arriving: list[int]) -> Metrics:
        """Update and pull each bucket before the next is pushed."""
        server, workers = self.server, self.server.workers
        weights = {worker: workers.push_scalars(worker) for worker in arriving}
        update = BucketedUpdate(buckets, server.state)
        for paths in buckets.paths:

            def push(worker: int, paths: Sequence[str] = paths) -> Sums:
                return weights[worker]._replace(grads=workers.push_gradients(worker, paths))

            sums = self._folded(arriving, push)
            published = update.bucket({path: sums.grads[path] for path in paths})
            for worker in arriving:
                workers.pull_some(worker, published)
            server.pace.sent(published[paths[0]])
        state, metrics = update.finish(sums._replace(grads={}))
        server.advance(state)
        for worker in arriving:
            workers.pushed(worker)
            server.mark_pulled(worker)
        return metrics

    def drain(self) -> None:
        """No-op: nothing is in flight between two steps."""
