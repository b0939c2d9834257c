"""How old a gradient may be: the rule, and the ledger of who pulled which version.

The server's version counts the updates that it made; each accepted push makes one. The *staleness*
of a push is the number of versions that were made between its worker's pull and its arrival.

- `drop`: a push of staleness > s is not applied.
- `wait`: a worker pulls only where no push can become older than s, whatever the order in which
  those in flight arrive. With n workers in flight that pulled versions p, one more at version v is
  safe when even the last of these n + 1 to arrive is: it then meets version v + n, so
  v + n - min(p, v) <= s. An arrival takes one from n and adds one to v, so what was safe stays
  safe. It follows that at most s + 1 workers are in flight at once.

With s = 0, or no s, the server goes by rounds instead: it waits for all workers and makes one
version of their mean, so that no push has an age, and no ledger is needed.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

OnStale = Literal["drop", "wait"]


@dataclass(frozen=True)
class Rule:
    """What becomes of stale gradients."""

    max_staleness: int | None = None  # None: synchronous
    on_stale: OnStale = "wait"
    decay: float = 1.0  # a push of staleness t is multiplied by decay**t

    @property
    def by_rounds(self) -> bool:
        """Whether every version is made of one push of each worker."""
        return not self.max_staleness

    @property
    def pace(self) -> str:
        """How the workers follow each other, in words."""
        return "in step" if self.by_rounds else f"at most {self.max_staleness} versions stale"


@dataclass(frozen=True)
class Push:
    """What the ledger says of a gradient that arrived."""

    staleness: int
    accepted: bool
    factor: float  # what an accepted gradient is multiplied by


class Ledger:
    """Who pulled which version, and what came of it. Workers are named by any hashable."""

    def __init__(self, rule: Rule, version: int = 0) -> None:
        if rule.by_rounds:
            raise ValueError("a server that goes by rounds keeps no ledger: no push has an age")
        self.rule = rule
        self.version = version
        self.accepted = 0
        self.dropped = 0
        self.waited = 0  # pulls that were put off by `wait`
        self.staleness: Counter[int] = Counter()  # of every push, the dropped ones included
        self._pulled: dict[object, int] = {}  # those in flight
        self._waiting: set[object] = set()

    @property
    def in_flight(self) -> frozenset[object]:
        return frozenset(self._pulled)

    def pull(self, worker: object) -> int | None:
        """The version that a worker computes on from now; None where it has to wait and ask again.

        Whether it has to depends on those in flight alone: ask again after an arrival.
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
        """A gradient arrived. Where it is accepted, this is a new version."""
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
        """A worker died: what it had in flight will not arrive, and nobody waits for it."""
        self._pulled.pop(worker, None)
        self._waiting.discard(worker)

    def _safe(self) -> bool:
        """Whether one more in flight leaves every push in flight within the bound."""
        if self.rule.on_stale == "drop":
            return True
        assert self.rule.max_staleness is not None
        oldest = min(self._pulled.values(), default=self.version)
        return self.version + len(self._pulled) - oldest <= self.rule.max_staleness
