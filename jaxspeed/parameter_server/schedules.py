"""Which worker computes next, and when the servers update: synchronous, or with bounded staleness.

The schedules depend on two protocols, each with two implementations: on the devices of this process
(`local.py`), and as processes on Ray (`ray/`). Workers finish in the order of a seeded clock, or in
their real one; pushes of one version are summed in the order of its parts, so that the order of
arrival changes no number.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxspeed.errors import RunError
from jaxspeed.objectives.terms_and_metrics import totals
from jaxspeed.parameter_server.server import folded_losses, mean_loss
from jaxspeed.parameter_server.staleness import Ledger, Push, Rule
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.program import Metrics

MAX_CONSECUTIVE_LOSSES = 3  # steps whose gradients did not reach the servers


class PushLostError(Exception):
    """A computed gradient did not reach the servers, whose state is unchanged."""


@dataclass(frozen=True)
class Task:
    """A part of a batch for a worker, with all that another worker needs to repeat it."""

    part: int
    batch: Any
    published: Any  # by the store: the version that the worker pulls
    train: bool = True  # gradients; else the loss in evaluation mode


@dataclass(frozen=True)
class Finished:
    """A finished task, and what it computed."""

    worker: int
    task: Any = None
    push: Any = None  # for the store: gradients in pieces, loss and weight


class Pool(Protocol):
    """Workers by number."""

    @property
    def size(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """The number of tasks in flight."""

    def start(self, worker: int, task: Any) -> None:
        """Start a task of a free worker."""

    def next(self) -> Finished:
        """The next finished task, whose worker is free again."""


class WorkerPool(Pool, Protocol):
    """Workers that compute."""

    def pull(self, published: Any) -> None:
        """Begin to send all workers what was published, ahead of their next tasks."""

    def discard(self) -> None:
        """Discard what is in flight."""

    def metrics(self) -> dict[str, float]: ...


class ServerStore(Protocol):
    """The servers: the state, its current version, and updates by what workers pushed."""

    version: int

    @property
    def buckets(self) -> Sequence[int | None]:
        """Parts of a synchronous update; (None,) where it depends on all gradients."""

    def publish(self, bucket: int | None = None) -> Any:
        """What workers pull of the current version, or of a bucket of the next one."""

    def losses(self, done: Finished) -> Sums:
        """Loss, weight and metrics of a push, without its gradients."""

    def reduce(
        self,
        pushes: Sequence[tuple[Finished, Sums]],
        factor: float = 1.0,
        bucket: int | None = None,
    ) -> Any:
        """The weighted mean of pushes, in this order, times `factor`; with their `losses`.

        It is in units of the current loss scale, whichever each push was computed under.
        """

    def apply(self, reduced: Any) -> Metrics:
        """Update by what was reduced; the metrics of the next version, once it is complete.

        Raises:
          PushLostError: something pushed did not arrive. The state is unchanged.
          StateLostError: a server failed.
        """


class SynchronousSchedule:
    """Each version is made of a push of each worker; also for `max_staleness: 0`."""

    def __init__(self, workers: WorkerPool, store: ServerStore) -> None:
        self._workers, self._store = workers, store
        self.staleness: Counter[int] = Counter()

    def train(self, parts: Sequence[Any]) -> dict[str, Any]:
        """One version from all parts, the i-th by worker i."""
        metrics, lost = None, 0
        while metrics is None:
            try:
                metrics = self._updated(run_all(self._workers, self._store, parts))
            except PushLostError as error:
                lost += 1
                if lost == MAX_CONSECUTIVE_LOSSES:
                    raise RunError(f"gradients do not reach the servers: {error}") from error
        self.staleness[0] += len(parts)
        return {**metrics, "version": self._store.version, **self._workers.metrics()}

    def _updated(self, done: Sequence[Finished]) -> Metrics:
        store, metrics = self._store, {}
        pushes = [(finished, store.losses(finished)) for finished in done]
        for bucket in store.buckets:  # each is pulled while the next one is pushed
            metrics = store.apply(store.reduce(pushes, bucket=bucket))
            self._workers.pull(store.publish(bucket))
        return metrics

    def drain(self) -> None:
        """No-op: nothing is in flight between two steps."""

    def abort(self) -> None:
        """Discard what is in flight."""
        self._workers.discard()


def run_all(
    workers: Pool, store: ServerStore, parts: Sequence[Any], train: bool = True
) -> list[Finished]:
    """Run each part on its worker; return the results by part."""
    published = store.publish()
    for part, batch in enumerate(parts):
        workers.start(part, Task(part, batch, published, train))
    return sorted((workers.next() for _ in parts), key=lambda finished: finished.worker)


class WorkerSchedule:
    """Workers under a rule of bounded staleness, first in, first out."""

    def __init__(self, rule: Rule, pool: Pool, version: int = 0) -> None:
        self.ledger = Ledger(rule, version)
        self._pool = pool
        self._free = deque(range(pool.size))

    def begin(self, task: Any = None) -> int | None:
        """Let the next free worker pull and start; None if none is free, or the rule says wait."""
        if not self._free:
            return None
        if self.ledger.pull(self._free[0]) is None:
            # The other free workers wait as well: the rule is the same for all.
            for worker in list(self._free)[1:]:
                self.ledger.pull(worker)
            return None
        worker = self._free.popleft()
        self._pool.start(worker, task)
        return worker

    def arrive(self) -> tuple[Finished, Push] | None:
        """The next push, and the ledger's record of it; None where nothing is in flight."""
        if not self._pool.in_flight:
            return None
        done = self._pool.next()
        self._free.append(done.worker)
        return done, self.ledger.push(done.worker)

    def abort(self) -> None:
        """Forget what is in flight."""
        for worker in [w for w in range(self._pool.size) if w in self.ledger.in_flight]:
            self.ledger.lost(worker)
            self._free.append(worker)


class AsynchronousSchedule:
    """Bounded staleness: free workers get the next parts; each accepted push makes a version."""

    def __init__(self, workers: WorkerPool, store: ServerStore, rule: Rule) -> None:
        self._workers, self._store = workers, store
        self._schedule = WorkerSchedule(rule, workers, store.version)
        # Since the last report:
        self._losses: Sums | None = None
        self._update: Metrics | None = None
        self._stalenesses: list[int] = []
        self._last_counts = (0, 0, 0)

    @property
    def staleness(self) -> Counter[int]:
        return self._schedule.ledger.staleness

    def train(self, parts: Sequence[Any]) -> dict[str, Any]:
        """Assign all parts; return once a push was accepted, with others possibly in flight.

        One is always accepted: as long as no version is made, pushes of workers that pulled here
        have staleness 0.
        """
        for part, batch in enumerate(parts):
            while self._schedule.begin(Task(part, batch, self._store.publish())) is None:
                self._arrive()
        while self._update is None:
            self._arrive()
        return self._report(self._update)

    def drain(self) -> None:
        """Process pushes until none is in flight."""
        while self._arrive():
            pass

    def abort(self) -> None:
        """Discard what is in flight."""
        self._workers.discard()
        self._schedule.abort()

    def _arrive(self) -> bool:
        """Process the next push; return whether there was one."""
        arrival = self._schedule.arrive()
        if arrival is None:
            return False
        done, push = arrival
        self._stalenesses.append(push.staleness)
        losses = self._store.losses(done)  # of a dropped push, nothing else is sent
        seen = self._losses
        self._losses = losses if seen is None else folded_losses(seen, losses)
        if push.accepted:
            self._update = self._store.apply(self._store.reduce([(done, losses)], push.factor))
        return True

    def _report(self, update: Metrics) -> dict[str, Any]:
        """The metrics since the last report, of pushes that may be of parts of an earlier call."""
        ledger = self._schedule.ledger
        assert self._losses is not None
        counts = (ledger.accepted, ledger.dropped, ledger.waited)
        since = (now - before for now, before in zip(counts, self._last_counts, strict=True))
        report = {
            **update,
            **mean_loss(self._losses),
            **dict(zip(("accepted", "dropped", "waited"), since, strict=True)),
            "staleness_mean": sum(self._stalenesses) / len(self._stalenesses),
            "staleness_max": max(self._stalenesses),
            "version": ledger.version,
            **self._workers.metrics(),
        }
        self._losses, self._update, self._stalenesses, self._last_counts = None, None, [], counts
        return report


def evaluated(workers: Pool, store: ServerStore, parts: Sequence[Any]) -> Metrics:
    """The loss of the parts in evaluation mode, with the current parameters."""
    first, *others = (
        store.losses(finished) for finished in run_all(workers, store, parts, train=False)
    )
    for sums in others:
        first = folded_losses(first, sums)
    return {**mean_loss(first), **totals(first.metrics)}
