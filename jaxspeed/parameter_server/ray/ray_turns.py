"""Whose turn it is: by rounds, or each worker at its own pace, in the order in which pushes arrive.

The rules are those of `jaxspeed.parameter_server`; here the order is that of real processes, where
one controller has a seeded clock.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspeed.errors import RunError
from jaxspeed.parameter_server.ray.failures import PushLostError
from jaxspeed.parameter_server.ray.server_functions import Told, together
from jaxspeed.parameter_server.ray.server_pool import Servers
from jaxspeed.parameter_server.ray.worker_pool import Crew, Done, Task
from jaxspeed.parameter_server.staleness import Ledger, Rule

LOST_IN_A_ROW = 3  # rounds whose gradients did not reach the servers


class Rounds:
    """Each version is made of a push of each worker, summed in the order of the parts."""

    def __init__(self, crew: Crew, servers: Servers, version: int) -> None:
        self._crew, self._servers = crew, servers
        self._version = version
        self.staleness: Counter[int] = Counter()

    def train(self, parts: Sequence[Any]) -> dict[str, Any]:
        """One version of all parts."""
        metrics, lost = None, 0
        while metrics is None:
            done = everyone(self._crew, "gradients", parts, self._servers.published)
            told, shares = together([one.told for one in done])
            try:
                metrics = self._servers.update([one.pushes for one in done], shares, told)
            except PushLostError as error:
                lost += 1
                if lost == LOST_IN_A_ROW:
                    raise RunError(f"gradients do not reach the servers: {error}") from error
        self.staleness[0] += len(parts)
        self._version += 1
        return {**metrics, "version": self._version}

    def drain(self) -> None:
        """Nothing is under way between two rounds."""

    def give_up(self) -> None:
        """What is under way is of no use."""
        self._crew.forget()


class OwnPace:
    """Each worker pulls when it is free and the rule lets it; each accepted push is a version."""

    def __init__(self, crew: Crew, servers: Servers, rule: Rule, version: int) -> None:
        self._crew, self._servers = crew, servers
        self._ledger = Ledger(rule, version)
        self._free = deque(range(crew.size))  # who asked first pulls first
        # Since the last report:
        self._told: list[Told] = []
        self._update: dict[str, Any] | None = None
        self._ages: list[int] = []
        self._counted = (0, 0, 0)

    @property
    def staleness(self) -> Counter[int]:
        return self._ledger.staleness

    def train(self, parts: Sequence[Any]) -> dict[str, Any]:
        """All parts are handed out, and at least one push was accepted; others are under way."""
        for part, batch in enumerate(parts):
            while not self._begin(part, batch):
                self._arrive()
        while self._update is None:
            self._arrive()
        return self._report(self._update)

    def drain(self) -> None:
        """Until nothing is under way."""
        while self._crew.under_way:
            self._arrive()

    def give_up(self) -> None:
        """What is under way is of no use."""
        self._crew.forget()
        for worker in [w for w in range(self._crew.size) if w in self._ledger.in_flight]:
            self._ledger.lost(worker)
            self._free.append(worker)

    def _begin(self, part: int, batch: Any) -> bool:
        """Whether a free worker was let pull, and has begun."""
        if not self._free:
            return False
        if self._ledger.pull(self._free[0]) is None:
            for worker in list(self._free)[1:]:  # they wait as well: the rule asks not who
                self._ledger.pull(worker)
            return False
        worker = self._free.popleft()
        self._crew.start(worker, Task("gradients", part, batch, self._servers.published))
        return True

    def _arrive(self) -> None:
        """The next push, of a worker that is free again."""
        done = self._crew.next()
        self._free.append(done.worker)
        push = self._ledger.push(done.worker)
        self._ages.append(push.staleness)
        self._told.append(done.told)
        if push.accepted:
            told, share = together([done.told])
            self._update = self._servers.update([done.pushes], share * push.factor, told)

    def _report(self, update: dict[str, Any]) -> dict[str, Any]:
        """What happened since the last one; that may be pushes of parts of an earlier call."""
        counts = (self._ledger.accepted, self._ledger.dropped, self._ledger.waited)
        since = (now - before for now, before in zip(counts, self._counted, strict=True))
        told, _ = together(self._told)
        found = {
            **update,
            **told.metrics,
            "loss": told.total / told.weight if told.weight > 0 else np.float32(0),
            "weight": told.weight,
            **dict(zip(("accepted", "dropped", "waited"), since, strict=True)),
            "staleness_mean": sum(self._ages) / len(self._ages),
            "staleness_max": max(self._ages),
            "version": self._ledger.version,
        }
        self._told, self._update, self._ages, self._counted = [], None, [], counts
        return found


def everyone(crew: Crew, method: str, parts: Sequence[Any], published: Sequence[Any]) -> list[Done]:
    """Each part by its own worker; what came of them, in their order."""
    for part, batch in enumerate(parts):
        crew.start(part, Task(method, part, batch, published))
    done = [crew.next() for _ in parts]
    return sorted(done, key=lambda one: one.task.part)
