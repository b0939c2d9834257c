"""`SearchLoop`: choices are filtered by formula, the best are estimated, then coordinate descent.

1. The unchanged config is estimated, and on each of the fastest meshes the choice that is fastest
   by formula among those that may fit.
2. From the best, choices that differ in one coordinate or in two are estimated, the fastest by
   formula first, until one is better; the descent goes on from there.
3. If none is, likewise from the best choices of the other meshes, what is better by formula.

It ends where that finds none either. For a neighbour the formula is corrected by the ratio of
estimate and formula at the choice that it is near to: similar choices have similar errors.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import Choice, changes
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

# Ratio of estimate and formula: of two choices at most two changes apart, and of two on different
# meshes, it differs by less in 8 of 10 pairs of the estimates of ten searches.
NEAR, FAR = 1.25, 1.5
# Estimates of meshes, of neighbours, and near other meshes: with more, neither ten searches of real
# models nor 120 of small spaces, with formulas wrong by a tenth, find better choices.
MESHES, NEIGHBOURS, JUMPS = 12, 16, 6
ELSEWHERE = 1.05  # NEAR for other meshes; with 1.0 ten of those 120 end 1% above the optimum, not 7
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
        base = self.space.base  # estimated even if that takes all the time: others compare with it
        self.done[base] = self.submit(base).result()
        self.on_estimate(1, self.best)
        self._estimate(self._fastest_by_formula())
        while tops := self._best_of_meshes():
            best = self.done[tops[0]]
            if not (
                self._estimate(self._near(tops[:1], best, NEAR), above=best)
                or self._estimate(self._near(tops[1:], best, ELSEWHERE)[:JUMPS], above=best)
            ):
                break
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

    def _best_of_meshes(self) -> list[Choice]:
        """The best estimated choice of each mesh, the best of all first."""
        able = [choice for choice, estimate in self.done.items() if not estimate.refused]
        tops: dict[object, Choice] = {}
        for choice in sorted(able, key=lambda choice: order_of(self.done[choice])):
            tops.setdefault(choice.mesh, choice)
        return list(tops.values())

    def _near(self, tops: Sequence[Choice], best: Estimate, slack: float) -> list[Choice]:
        """Neighbours of `tops` that by formula are better than the best, the best of them first.

        While nothing fits, the smallest is the best. `slack` is how much worse they may be.
        """
        ranked = {}
        for at in tops:
            here, cost = self.done[at], self.analytic_cost(at)
            slow, large = here.seconds / cost.seconds, here.device / max(cost.device, 1.0)
            for i, choice in enumerate(self.space.near(at)):
                if choice in self.done or choice in ranked:
                    continue
                formula = self.analytic_cost(choice)
                seconds, device = formula.seconds * slow, formula.device * large
                excess = self.memory_excess(AnalyticCost(device, formula.host, seconds))
                if best.fits == "fits":
                    if excess <= slack and seconds < best.seconds * slack:
                        ranked[choice] = 1.0, seconds, i
                elif excess <= slack or device < best.device:
                    ranked[choice] = excess, seconds, i
        order = sorted(ranked, key=ranked.__getitem__)
        # Of changes of two settings many are alike: the best of each setting alone is never left
        # out (gpt2_small on v5e:2x4 would end 1% above the optimum).
        alone: dict[str, Choice] = {}
        for choice in order:
            for changed in (changes(at, choice) for at in tops):
                if len(changed) == 1:
                    alone.setdefault(changed[0], choice)
        return list(dict.fromkeys([*order[:NEIGHBOURS], *alone.values()]))

    # -- estimates --------------------------------------------------------------------------------

    def _over(self) -> bool:
        late = time.monotonic() - self._begun >= self.limits.seconds
        return late or len(self.done) >= self.limits.trials

    def _may_begin(self, under_way: int) -> bool:
        full = len(self.done) + under_way >= self.limits.trials
        return under_way < self.limits.workers and not full and not self._over()

    def _estimate(self, choices: Iterable[Choice], above: Estimate | None = None) -> Choice | None:
        """Estimate choices concurrently; with `above`, stop at one that is better.

        Estimates in flight are waited for, so that none is lost.
        """
        pending = iter(dict.fromkeys(c for c in choices if c not in self.done))
        under_way: dict[Future[Estimate], Choice] = {}
        better: Choice | None = None
        while True:
            while better is None and self._may_begin(len(under_way)):
                choice = next(pending, None)
                if choice is None:
                    break
                under_way[self.submit(choice)] = choice
            if not under_way:
                return better
            left = self.limits.seconds - (time.monotonic() - self._begun)
            ready, _ = wait(under_way, timeout=max(left, 0.0), return_when=FIRST_COMPLETED)
            if not ready and self._over():
                return better
            for future in ready:
                choice = under_way.pop(future)
                self.done[choice] = future.result()
                self.on_estimate(len(self.done), self.best)
                if above and is_better(self.done[choice], above):
                    better, above = choice, self.done[choice]


_RANKS = {"fits": 0, "tight": 1, "does not fit": 2}


def order_of(estimate: Estimate) -> tuple[float, ...]:
    """Sort key, best first: fitting choices by time, others by memory excess."""
    if estimate.refused:
        return (3, 0.0)
    rank = _RANKS[estimate.fits]
    return (rank, estimate.over if rank == 2 else estimate.seconds)


def is_better(estimate: Estimate, than: Estimate) -> bool:
    """Whether `estimate` is an improvement on `than`."""
    if estimate.refused:
        return False
    (rank, value), (other, bar) = order_of(estimate), order_of(than)
    return rank < other or (rank == other and value < bar * (1 - GAIN))


def best_of(done: dict[Choice, Estimate]) -> Choice | None:
    """The best choice that fits, or fits tightly."""
    able = [
        c
        for c, estimate in done.items()
        if not estimate.refused and estimate.fits != "does not fit"
    ]
    return min(able, key=lambda c: order_of(done[c]), default=None)
