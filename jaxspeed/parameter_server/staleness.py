"""Bounded staleness: the rule for stale gradients, and the ledger of pulled versions.

The server's version counts its updates; each accepted push makes one. The *staleness* of a push is
the number of versions that were made between its worker's pull and its arrival.

- `drop`: a push of staleness > s is not applied.
- `wait`: a worker pulls only where no push can become older than s, whatever the order in which
  those in flight arrive. With n workers in flight that pulled versions p, one more at version v is
  safe when even the last of these n + 1 to arrive is: it then meets version v + n, so
  v + n - min(p, v) <= s. An arrival takes one from n and adds one to v, so what was safe stays
  safe. It follows that at most s + 1 workers are in flight at once.

With s = 0, or no s, the server is synchronous: it waits for all workers and makes one version of
their mean, so that every push has staleness 0 and no ledger is needed.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

OnStale = Literal["drop", "wait"]


@dataclass(frozen=True)
class Rule:
    """The rule for stale gradients."""

    max_staleness: int | None = None  # None: synchronous
    on_stale: OnStale = "wait"
    decay: float = 1.0  # a push of staleness t is multiplied by decay**t

    @property
    def synchronous(self) -> bool:
        """Whether every version is made of one push of each worker."""
        return not self.max_staleness

    @property
    def pace(self) -> str:
        """The synchronization of workers, as text."""
        return "in step" if self.synchronous else f"at most {self.max_staleness} versions stale"


@dataclass(frozen=True)
class Push:
    """The ledger's record of a gradient that arrived."""

    staleness: int
    accepted: bool
    factor: float  # what an accepted gradient is multiplied by


class Ledger:
    """Who pulled which version, and what came of it. Workers are named by any hashable."""

    def __init__(self, rule: Rule, version: int = 0) -> None:
        if rule.synchronous:
            raise ValueError("a synchronous server needs no ledger: every push has staleness 0")
        self.rule = rule
        self.version = version
        self.accepted = 0
        self.dropped = 0
        self.waited = 0  # pulls that `wait` delayed
        self.staleness: Counter[int] = Counter()  # of every push, the dropped ones included
        self._pulled: dict[object, int] = {}  # those in flight
        self._waiting: set[object] = set()

    @property
    def in_flight(self) -> frozenset[object]:
        return frozenset(self._pulled)

    def pull(self, worker: object) -> int | None:
        """The version that a worker pulls; None where it has to wait and retry.

        That depends on the pushes in flight alone: retry after an arrival.
        """
        if worker in self._pulled:
            raise ValueError(f"worker {worker!r} pulls while its push is in flight")
        if not self._safe():
            self._waiting.add(worker)
            return None
        if worker in self._waiting:
            self._waiting.remove(worker)
            self.waited += 1
        self._pulled[worker] = self.version
        return self.version

    def push(self, worker: object) -> Push:
        """Record an arrived gradient; an accepted one makes a new version."""
        staleness = self.version - self._pulled.pop(worker)
        self.staleness[staleness] += 1
        assert self.rule.max_staleness is not None
        if staleness > self.rule.max_staleness:
            self.dropped += 1
            return Push(staleness, False, 0.0)
        self.accepted += 1
        self.version += 1
        return Push(staleness, True, self.rule.decay**staleness)

    def lost(self, worker: object) -> None:
        """Forget a worker that died, with its push in flight."""
        self._pulled.pop(worker, None)
        self._waiting.discard(worker)

    def _safe(self) -> bool:
        """Whether one more in flight leaves every push in flight within the bound."""
        if self.rule.on_stale == "drop":
            return True
        assert self.rule.max_staleness is not None
        oldest = min(self._pulled.values(), default=self.version)
        return self.version + len(self._pulled) - oldest <= self.rule.max_staleness
