"""`SearchLoop`: choices are filtered by formula, the best are estimated, then coordinate descent.

1. The unchanged config is estimated, and on each of the fastest meshes the choice that is fastest
   by formula among those that may fit.
2. From the best, choices that differ in one coordinate or in two are estimated, the fastest by
   formula first, until one is better; the descent goes on from there.

It ends where none of them is better. For a neighbour the formula is corrected by the ratio of
estimate and formula at the current choice: similar choices have similar errors.
"""

import heapq
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import Choice
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

# Ratio of estimate and formula: of two choices at most two changes apart, and of two on different
# meshes, it differed by less in 8 of 10 pairs of the estimates of ten searches, in time and memory.
NEAR, FAR = 1.25, 1.5
MESHES = 12  # that are estimated first; more is time without a gain in the ten searches
NEIGHBOURS = 24  # of one choice that are estimated, a fifth of them out of order by formula
GAIN = 0.002  # share of a step below which a choice is no improvement: estimates resolve no less

Submit = Callable[[Choice], "Future[Estimate]"]


@dataclass(frozen=True)
class Limits:
    """Limits of a search.

    Attributes:
      seconds: wall time.
      trials: number of estimates.
      workers: concurrent estimates.
    """

    seconds: float = 240.0
    trials: int = 10**6
    workers: int = 2


@dataclass
class SearchLoop:
    """A running search.

    Attributes:
      space: the choices.
      analytic_cost: bytes and seconds by formula.
      memory_excess: needed over available memory of a cost, with headroom; 1 if it should fit.
      submit: starts an estimate.
      limits: of time, estimates and concurrency.
      on_estimate: called after each estimate, with their number and the best choice.
    """

    space: Space
    analytic_cost: Callable[[Choice], AnalyticCost]
    memory_excess: Callable[[AnalyticCost], float]
    submit: Submit
    limits: Limits = Limits()
    on_estimate: Callable[[int, Choice | None], None] = lambda count, best: None
    done: dict[Choice, Estimate] = field(default_factory=dict)
    considered: int = 0  # choices with an analytic cost
    _begun: float = field(default_factory=time.monotonic)

    def run(self) -> dict[Choice, Estimate]:
        """Run the search; all estimates."""
        self._estimate([self.space.base])
        self._estimate(self._fastest_by_formula())
        able = [choice for choice, found in self.done.items() if not found.refused]
        at = min(able, key=lambda choice: order_of(self.done[choice]), default=None)
        while at is not None:
            at = self._estimate(self._neighbours(at), above=self.done[at])
        return self.done

    @property
    def best(self) -> Choice | None:
        """The fastest choice with headroom, else the fastest that may fit."""
        return best_of(self.done)

    def _fastest_by_formula(self) -> list[Choice]:
        """The fastest choice of each mesh that may fit, the fastest meshes first."""
        first: dict[object, tuple[float, float, int, Choice]] = {}
        for choice in self.space.coarse():
            cost, self.considered = self.analytic_cost(choice), self.considered + 1
            excess = self.memory_excess(cost)
            if excess <= FAR:
                item = excess, cost.seconds, self.considered, choice
                first[choice.mesh] = min(item, first.get(choice.mesh, item))
        return [choice for *_, choice in heapq.nsmallest(MESHES, first.values())]

    def _neighbours(self, at: Choice) -> list[Choice]:
        """Neighbours that may be better, the most promising first: while nothing fits, by memory.

        `at` is the best so far.
        """
        here, cost = self.done[at], self.analytic_cost(at)
        slow, large = here.seconds / cost.seconds, here.device / max(cost.device, 1.0)
        found = []
        for i, choice in enumerate(self.space.near(at)):
            if choice in self.done:
                continue
            formula = self.analytic_cost(choice)
            seconds, device = formula.seconds * slow, formula.device * large
            excess = self.memory_excess(AnalyticCost(device, formula.host, seconds))
            if here.fits == "fits":
                if excess <= NEAR and seconds <= here.seconds * NEAR:
                    found.append((1.0, seconds, i, choice))
            elif excess <= NEAR or device < here.device:
                found.append((excess, seconds, i, choice))
        return [choice for *_, choice in heapq.nsmallest(NEIGHBOURS, found)]

    # -- estimates --------------------------------------------------------------------------------

    def _over(self, begun: int = 0) -> bool:
        """Whether the limits forbid another estimate, with `begun` under way."""
        late = time.monotonic() - self._begun >= self.limits.seconds
        return late or len(self.done) + begun >= self.limits.trials

    def _estimate(self, choices: Iterable[Choice], above: Estimate | None = None) -> Choice | None:
        """Estimate choices concurrently; with `above`, stop at one that is better.

        Estimates in flight are waited for, so that none is lost.
        """
        pending = iter(dict.fromkeys(c for c in choices if c not in self.done))
        under_way: dict[Future[Estimate], Choice] = {}
        found: Choice | None = None
        while True:
            while not (
                found or len(under_way) >= self.limits.workers or self._over(len(under_way))
            ):
                choice = next(pending, None)
                if choice is None:
                    break
                under_way[self.submit(choice)] = choice
            if not under_way:
                return found
            left = self.limits.seconds - (time.monotonic() - self._begun)
            ready, _ = wait(under_way, timeout=max(left, 0.0), return_when=FIRST_COMPLETED)
            if not ready and self._over():
                return found
            for future in ready:
                choice = under_way.pop(future)
                self.done[choice] = future.result()
                self.on_estimate(len(self.done), self.best)
                if above and is_better(self.done[choice], above):
                    found, above = choice, self.done[choice]


_RANKS = {"fits": 0, "tight": 1, "does not fit": 2}


def order_of(found: Estimate) -> tuple[float, ...]:
    """Sort key, best first: fitting choices by time, others by memory excess."""
    if found.refused:
        return (3, 0.0)
    rank = _RANKS[found.fits]
    return (rank, found.over if rank == 2 else found.seconds)


def is_better(found: Estimate, than: Estimate) -> bool:
    """Whether `found` is an improvement on `than`."""
    if found.refused:
        return False
    (rank, value), (other, bar) = order_of(found), order_of(than)
    return rank < other or (rank == other and value < bar * (1 - GAIN))


def best_of(done: dict[Choice, Estimate]) -> Choice | None:
    """The best choice that fits, or fits tightly."""
    able = [c for c, found in done.items() if not found.refused and found.fits != "does not fit"]
    return min(able, key=lambda c: order_of(done[c]), default=None)
