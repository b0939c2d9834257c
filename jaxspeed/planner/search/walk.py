"""`SearchLoop`: local search over choices, ordered by analytic costs and decided by estimates.

Analytic costs order all choices; the most promising one of each mesh is estimated. From the best,
the search climbs by single changes, then jumps to any choice that is better by corrected analytic
cost. Analytic costs of similar choices are wrong by similar factors, so they are corrected by the
estimates of the most similar choices.
"""

import heapq
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from statistics import median

from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import Choice
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

SEEDS = 16  # most meshes that are estimated first
MIN_SEEDS = 6
SEED_SLOWDOWN = 1.5  # meshes slower than the fastest by more, by formula, are no seeds
RETRIES = 2  # estimates per mesh if the first does not fit
MAX_STALL = 24  # estimates in a row without an improvement end the search
JUMPS = 6  # estimates between two orderings of all choices
EXCLUDED = 1.5  # memory excess by formula from which a choice is excluded
NEIGHBOUR_SLOWDOWN = 1.25  # neighbours slower by more, by formula, are not estimated
HEADROOM = 1.1  # by corrected formula, of choices that are estimated
IMPROVEMENT = 0.998  # a step has to be faster by more to count as an improvement

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
      memory_excess: needed over available memory of a cost; 1 if it should fit.
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
    _costs: dict[Choice, AnalyticCost] = field(default_factory=dict)
    _begun: float = field(default_factory=time.monotonic)

    def run(self) -> dict[Choice, Estimate]:
        """Run the search; all estimates."""
        self._estimate([self.space.base])
        self._estimate(self._seeds())
        self._retry_smaller()
        top = self.best or self._nearest()
        while top and not self._over():
            self._climb(top)
            top = self._jump()
        return self.done

    @property
    def best(self) -> Choice | None:
        """The fastest choice with headroom, else the fastest that may fit."""
        return best_of(self.done)

    # -- seeds ------------------------------------------------------------------------------------

    def cost_of(self, choice: Choice) -> AnalyticCost:
        if choice not in self._costs:
            self._costs[choice] = self.analytic_cost(choice)
        return self._costs[choice]

    def _seeds(self) -> list[Choice]:
        """The fastest choice of each mesh by formula that may fit, the best meshes first."""
        first: dict[object, tuple[tuple[float, float], Choice]] = {}
        for choice in self.space.coarse():
            self.considered += 1
            cost = self.analytic_cost(choice)
            if self.memory_excess(cost) > EXCLUDED:
                continue
            self._costs[choice] = cost
            value = self.memory_excess(cost), cost.seconds
            if choice.mesh not in first or value < first[choice.mesh][0]:
                first[choice.mesh] = value, choice
        order = heapq.nsmallest(SEEDS, first.values(), key=lambda item: item[0])
        slowest = min((seconds for (_, seconds), _ in order), default=0.0) * SEED_SLOWDOWN
        near = [choice for (_, seconds), choice in order if seconds <= slowest]
        return near if len(near) >= MIN_SEEDS else [choice for _, choice in order[:MIN_SEEDS]]

    def _retry_smaller(self) -> None:
        """Estimate a smaller choice on each mesh whose first choice does not fit."""
        for _ in range(RETRIES):
            smaller = []
            for choice, found in list(self.done.items()):
                if found.fits == "fits" or found.refused:
                    continue
                if any(
                    c.mesh == choice.mesh and other.fits == "fits" for c, other in self.done.items()
                ):
                    continue
                smaller += self._smaller(choice, found)
            self._estimate(smaller)

    def _smaller(self, choice: Choice, found: Estimate) -> list[Choice]:
        """The fastest by formula on the same mesh that should fit, given this estimate."""
        most = self.cost_of(choice).device / max(found.over, 1e-9) / 1.25
        host = self.cost_of(choice).host / max(found.host / found.host_limit, 1e-9)
        same = [
            (cost.seconds, i, c)
            for i, (c, cost) in enumerate(self._costs.items())
            if c.mesh == choice.mesh
            and c not in self.done
            and cost.device <= most
            and (not found.host or cost.host <= host)
        ]
        return [min(same)[2]] if same else []

    # -- climbing and jumping ---------------------------------------------------------------------

    def _nearest(self) -> Choice | None:
        """The choice with the least memory excess, if nothing fits."""
        able = [c for c in self.done if not self.done[c].refused]
        return min(able, key=lambda c: order_of(self.done[c]), default=None)

    def _climb(self, top: Choice) -> None:
        """Move to better neighbours until there is none."""
        while not self._over():
            near = self._promising(top)[:MAX_STALL]
            better = self._estimate(near, above=self.done[top])
            if better is None:
                return
            top = better

    def _jump(self) -> Choice | None:
        """A better choice from anywhere in the space; None if none is likely."""
        best, stalled = self.best, 0
        while best and stalled < MAX_STALL and not self._over():
            likely = self._likely(self.done[best])
            if not likely:
                return None
            if better := self._estimate(likely, above=self.done[best]):
                return better
            stalled += len(likely)
        return None

    def _likely(self, best: Estimate) -> list[Choice]:
        """Choices that are faster than the best and fit, by corrected analytic cost."""
        factors = self._factors()
        found = []
        for i, (choice, cost) in enumerate(self._costs.items()):
            if choice in self.done:
                continue
            slow, large = next(factors[key] for key in _similarity_keys(choice) if key in factors)
            seconds, device = cost.seconds * slow, cost.device * large
            if seconds < best.seconds and device * HEADROOM <= best.device_limit:
                found.append((seconds, i, choice))
        return [choice for *_, choice in heapq.nsmallest(JUMPS, found)]

    def _factors(self) -> dict[object, tuple[float, float]]:
        """Correction factors of analytic time and bytes, per group of similar choices."""
        seen: dict[object, list[tuple[float, float]]] = {}
        for choice, found in self.done.items():
            if not found.refused:
                cost = self.cost_of(choice)
                both = found.seconds / cost.seconds, found.device / max(cost.device, 1.0)
                for key in _similarity_keys(choice):
                    seen.setdefault(key, []).append(both)
        return {
            key: (median([t for t, _ in both]), median([m for _, m in both]))
            for key, both in seen.items()
        }

    def _promising(self, top: Choice) -> list[Choice]:
        """Neighbours that may be better than the best, the most promising first."""
        here, cost = self.done[top], self.cost_of(top)
        best = self.done[self.best] if self.best else here
        fits = best.fits == "fits"
        slow = here.seconds / cost.seconds if cost.seconds else 1.0
        large = here.device / cost.device if cost.device else 1.0
        room = HEADROOM if fits else 1 / HEADROOM
        found = []
        for i, choice in enumerate(self.space.near(top)):
            if choice in self.done:
                continue
            guess = self.cost_of(choice)
            device, seconds = guess.device * large, guess.seconds * slow
            if device * room > here.device_limit and device > here.device:
                continue
            if fits and seconds > best.seconds * NEIGHBOUR_SLOWDOWN:
                continue
            # While nothing fits, smaller choices come first.
            over = 0.0 if fits else max(device / max(here.device_limit, 1), 0.8)
            found.append((over, seconds, i, choice))
        return [choice for *_, choice in sorted(found)]

    # -- estimates --------------------------------------------------------------------------------

    def _over(self) -> bool:
        late = time.monotonic() - self._begun >= self.limits.seconds
        return late or len(self.done) >= self.limits.trials

    def _estimate(self, choices: Iterable[Choice], above: Estimate | None = None) -> Choice | None:
        """Estimate choices concurrently; with `above`, stop at one that is better.

        Estimates in flight are waited for, so that none is lost.
        """
        pending = iter(dict.fromkeys(c for c in choices if c not in self.done))
        under_way: dict[Future[Estimate], Choice] = {}
        found: Choice | None = None
        while True:
            while (
                found is None and len(under_way) < self.limits.workers and not self._full(under_way)
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
                bar = self.done[found] if found else above
                if bar and above and is_better(self.done[choice], bar):
                    found = choice

    def _full(self, under_way: dict["Future[Estimate]", Choice]) -> bool:
        begun = len(self.done) + len(under_way)
        busy = len(under_way) >= self.limits.workers
        return busy or self._over() or begun >= self.limits.trials


def _similarity_keys(choice: Choice) -> list[object]:
    """Groups of similar choices that a choice belongs to, the narrowest first."""
    mesh, saved = choice.mesh, (choice.recompute, choice.stage_saves)
    offload = choice.offload_activations, choice.offload_optimizer, choice.offload_parameters
    return [
        (mesh, saved, offload, choice.stage, choice.sequence),
        (mesh, saved, offload),
        (mesh, offload),
        mesh,
        (saved, offload),
        offload,
        None,
    ]


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
    return rank < other or (rank == other and value < bar * IMPROVEMENT)


def best_of(done: dict[Choice, Estimate]) -> Choice | None:
    """The best choice that fits, or fits tightly."""
    able = [c for c, found in done.items() if not found.refused and found.fits != "does not fit"]
    return min(able, key=lambda c: order_of(done[c]), default=None)
