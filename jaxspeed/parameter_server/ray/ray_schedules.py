"""Synchronous and asynchronous training on Ray: which worker computes next, when servers update.

The rules are those of `jaxspeed.parameter_server`, with the order of real processes in place of the
seeded clock.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspeed.errors import RunError
from jaxspeed.parameter_server.ray.failures import PushLostError
from jaxspeed.parameter_server.ray.server_functions import LossScalars, combine_scalars
from jaxspeed.parameter_server.ray.server_pool import ServerPool
from jaxspeed.parameter_server.ray.worker_pool import TaskResult, WorkerPool, WorkerTask
from jaxspeed.parameter_server.staleness import Ledger, Rule

MAX_CONSECUTIVE_LOSSES = 3  # steps whose gradients did not reach the servers


class RaySynchronousSchedule:
    """Each version is made of a push of each worker, summed in the order of the parts."""

    def __init__(self, workers: WorkerPool, servers: ServerPool, version: int) -> None:
        self._workers, self._servers = workers, servers
        self._version = version
        self.staleness: Counter[int] = Counter()

    def train(self, parts: Sequence[Any]) -> dict[str, Any]:
        """One version of all parts."""
        metrics, lost = None, 0
        while metrics is None:
            done = run_all(self._workers, "gradients", parts, self._servers.published)
            scalars, shares = combine_scalars([one.scalars for one in done])
            try:
                metrics = self._servers.update([one.pushes for one in done], shares, scalars)
            except PushLostError as error:
                lost += 1
                if lost == MAX_CONSECUTIVE_LOSSES:
                    raise RunError(f"gradients do not reach the servers: {error}") from error
        self.staleness[0] += len(parts)
        self._version += 1
        return {**metrics, "version": self._version}

    def drain(self) -> None:
        """No-op: nothing is in flight between two steps."""

    def abort(self) -> None:
        """Discard what is in flight."""
        self._workers.discard()


class RayAsynchronousSchedule:
    """Bounded staleness: free workers pull when the rule permits; an accepted push is a version."""

    def __init__(self, workers: WorkerPool, servers: ServerPool, rule: Rule, version: int) -> None:
        self._workers, self._servers = workers, servers
        self._ledger = Ledger(rule, version)
        self._free = deque(range(workers.size))  # first in, first out
        # Since the last report:
        self._scalars: list[LossScalars] = []
        self._update: dict[str, Any] | None = None
        self._stalenesses: list[int] = []
        self._last_counts = (0, 0, 0)

    @property
    def staleness(self) -> Counter[int]:
        return self._ledger.staleness

    def train(self, parts: Sequence[Any]) -> dict[str, Any]:
        """Assign all parts; return once a push was accepted, with others possibly in flight."""
        for part, batch in enumerate(parts):
            while not self._begin(part, batch):
                self._arrive()
        while self._update is None:
            self._arrive()
        return self._report(self._update)

    def drain(self) -> None:
        """Process pushes until none is in flight."""
        while self._workers.in_flight:
            self._arrive()

    def abort(self) -> None:
        """Discard what is in flight."""
        self._workers.discard()
        for worker in [w for w in range(self._workers.size) if w in self._ledger.in_flight]:
            self._ledger.lost(worker)
            self._free.append(worker)

    def _begin(self, part: int, batch: Any) -> bool:
        """Start a free worker if the rule lets it pull; return whether it did."""
        if not self._free:
            return False
        if self._ledger.pull(self._free[0]) is None:
            for worker in list(self._free)[1:]:  # they wait as well: the rule is the same for all
                self._ledger.pull(worker)
            return False
        worker = self._free.popleft()
        self._workers.start(worker, WorkerTask("gradients", part, batch, self._servers.published))
        return True

    def _arrive(self) -> None:
        """Process the next push, whose worker is free again."""
        done = self._workers.next()
        self._free.append(done.worker)
        push = self._ledger.push(done.worker)
        self._stalenesses.append(push.staleness)
        self._scalars.append(done.scalars)
        if push.accepted:
            scalars, share = combine_scalars([done.scalars])
            self._update = self._servers.update([done.pushes], share * push.factor, scalars)

    def _report(self, update: dict[str, Any]) -> dict[str, Any]:
        """The metrics since the last report, of pushes that may be of parts of an earlier call."""
        counts = (self._ledger.accepted, self._ledger.dropped, self._ledger.waited)
        since = (now - before for now, before in zip(counts, self._last_counts, strict=True))
        scalars, _ = combine_scalars(self._scalars)
        found = {
            **update,
            **scalars.metrics,
            "loss": scalars.total / scalars.weight if scalars.weight > 0 else np.float32(0),
            "weight": scalars.weight,
            **dict(zip(("accepted", "dropped", "waited"), since, strict=True)),
            "staleness_mean": sum(self._stalenesses) / len(self._stalenesses),
            "staleness_max": max(self._stalenesses),
            "version": self._ledger.version,
        }
        self._scalars, self._update, self._stalenesses, self._last_counts = [], None, [], counts
        return found


def run_all(
    workers: WorkerPool, method: str, parts: Sequence[Any], published: Sequence[Any]
) -> list[TaskResult]:
    """Run each part on its worker; return the results by part."""
    for part, batch in enumerate(parts):
        workers.start(part, WorkerTask(method, part, batch, published))
    done = [workers.next() for _ in parts]
    return sorted(done, key=lambda one: one.task.part)
