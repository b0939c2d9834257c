"""The search itself: what is estimated, in which order, and when nothing better is to be had.

Formulas order all choices; of each mesh the most promising is estimated. From the best it goes on
by single changes for as long as they help, then anywhere that formulas still think better. They are
wrong by much the same factor for two choices that are alike, so they are corrected by what is known
of the most alike.
"""

import heapq
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from statistics import median

from jaxspeed.planner.search.analytic_cost import Sketched
from jaxspeed.planner.search.candidate import Choice
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

SEEDS = 16  # meshes that are looked at
FEW_SEEDS = 6  # ... at least
FAR = 1.5  # meshes that are slower by formula by more than that are left out of them
OF_A_MESH = 2  # estimates of each, where the first does not fit
QUIET = 24  # estimates in a row without anything better are enough
AT_ONCE = 6  # by one order of all choices
HOPELESS = 1.5  # formulas are trusted to tell what is larger by that
NEARLY = 1.25  # formulas are trusted to tell what is slower by more than that
ROOM = 1.1  # head room by formula, corrected, of what is worth an estimate
BETTER = 0.998  # what is faster by less is no reason to go on

Submit = Callable[[Choice], "Future[Estimate]"]


@dataclass(frozen=True)
class Limits:
    """When to stop.

    Attributes:
      seconds: of wall time, from `begun`.
      trials: estimates.
      workers: estimates at one time.
    """

    seconds: float = 240.0
    trials: int = 10**6
    workers: int = 2


@dataclass
class SearchLoop:
    """A search under way.

    Attributes:
      space: what there is to choose from.
      sketch: bytes and seconds by formula.
      lacking: by what factor a sketch needs too much; 1 where it should fit.
      submit: begins an estimate.
      limits: when to stop.
      told: called as each estimate arrives, with the number of them and the best.
    """

    space: Space
    sketch: Callable[[Choice], Sketched]
    lacking: Callable[[Sketched], float]
    submit: Submit
    limits: Limits = Limits()
    told: Callable[[int, Choice | None], None] = lambda count, best: None
    done: dict[Choice, Estimate] = field(default_factory=dict)
    considered: int = 0  # choices that formulas looked at
    _sketches: dict[Choice, Sketched] = field(default_factory=dict)
    _begun: float = field(default_factory=time.monotonic)

    def run(self) -> dict[Choice, Estimate]:
        """All that was estimated."""
        self._estimate([self.space.base])
        self._estimate(self._seeds())
        self._mend()
        top = self.best or self._nearest()
        while top and not self._over():
            self._climb(top)
            top = self._elsewhere()
        return self.done

    @property
    def best(self) -> Choice | None:
        """The fastest of those with head room, else of those that may fit."""
        return best_of(self.done)

    # -- where it begins --------------------------------------------------------------------------

    def sketched(self, choice: Choice) -> Sketched:
        if choice not in self._sketches:
            self._sketches[choice] = self.sketch(choice)
        return self._sketches[choice]

    def _seeds(self) -> list[Choice]:
        """Of each mesh what is fastest by formula among what may fit, the best meshes first."""
        first: dict[object, tuple[tuple[float, float], Choice]] = {}
        for choice in self.space.coarse():
            self.considered += 1
            found = self.sketch(choice)
            if self.lacking(found) > HOPELESS:
                continue
            self._sketches[choice] = found
            value = self.lacking(found), found.seconds
            if choice.mesh not in first or value < first[choice.mesh][0]:
                first[choice.mesh] = value, choice
        order = heapq.nsmallest(SEEDS, first.values(), key=lambda item: item[0])
        slowest = min((seconds for (_, seconds), _ in order), default=0.0) * FAR
        near = [choice for (_, seconds), choice in order if seconds <= slowest]
        return near if len(near) >= FEW_SEEDS else [choice for _, choice in order[:FEW_SEEDS]]

    def _mend(self) -> None:
        """Where a mesh's first choice does not fit, what is likely to, as far as formulas know."""
        for _ in range(OF_A_MESH):
            again = []
            for choice, found in list(self.done.items()):
                if found.fits == "fits" or found.refused:
                    continue
                if any(
                    c.mesh == choice.mesh and other.fits == "fits" for c, other in self.done.items()
                ):
                    continue
                again += self._smaller(choice, found)
            self._estimate(again)

    def _smaller(self, choice: Choice, found: Estimate) -> list[Choice]:
        """The fastest by formula on the same mesh that should fit, by what is known of this."""
        most = self.sketched(choice).device / max(found.over, 1e-9) / 1.25
        host = self.sketched(choice).host / max(found.host / found.host_limit, 1e-9)
        same = [
            (sketch.seconds, i, c)
            for i, (c, sketch) in enumerate(self._sketches.items())
            if c.mesh == choice.mesh
            and c not in self.done
            and sketch.device <= most
            and (not found.host or sketch.host <= host)
        ]
        return [min(same)[2]] if same else []

    # -- how it goes on ---------------------------------------------------------------------------

    def _nearest(self) -> Choice | None:
        """Where nothing fits, what lacks least."""
        able = [c for c in self.done if not self.done[c].refused]
        return min(able, key=lambda c: order_of(self.done[c]), default=None)

    def _climb(self, top: Choice) -> None:
        """Single changes from one choice, and on from what is better."""
        while not self._over():
            near = self._promising(top)[:QUIET]
            better = self._estimate(near, above=self.done[top])
            if better is None:
                return
            top = better

    def _elsewhere(self) -> Choice | None:
        """Something better than the best, from anywhere; None where formulas know of nothing."""
        best, quiet = self.best, 0
        while best and quiet < QUIET and not self._over():
            likely = self._likely(self.done[best])
            if not likely:
                return None
            if better := self._estimate(likely, above=self.done[best]):
                return better
            quiet += len(likely)
        return None

    def _likely(self, best: Estimate) -> list[Choice]:
        """What formulas, corrected, think as fast as the best and not too large."""
        factors = self._factors()
        found = []
        for i, (choice, sketch) in enumerate(self._sketches.items()):
            if choice in self.done:
                continue
            slow, large = next(factors[key] for key in _alike(choice) if key in factors)
            seconds, device = sketch.seconds * slow, sketch.device * large
            if seconds < best.seconds and device * ROOM <= best.device_limit:
                found.append((seconds, i, choice))
        return [choice for *_, choice in heapq.nsmallest(AT_ONCE, found)]

    def _factors(self) -> dict[object, tuple[float, float]]:
        """By which formulas are wrong, of time and of bytes, for choices that are alike."""
        seen: dict[object, list[tuple[float, float]]] = {}
        for choice, found in self.done.items():
            if not found.refused:
                sketch = self.sketched(choice)
                both = found.seconds / sketch.seconds, found.device / max(sketch.device, 1.0)
                for key in _alike(choice):
                    seen.setdefault(key, []).append(both)
        return {
            key: (median([t for t, _ in both]), median([m for _, m in both]))
            for key, both in seen.items()
        }

    def _promising(self, top: Choice) -> list[Choice]:
        """Neighbours that may be better than the best, the most promising first."""
        here, sketch = self.done[top], self.sketched(top)
        best = self.done[self.best] if self.best else here
        fits = best.fits == "fits"
        slow = here.seconds / sketch.seconds if sketch.seconds else 1.0
        large = here.device / sketch.device if sketch.device else 1.0
        room = ROOM if fits else 1 / ROOM
        found = []
        for i, choice in enumerate(self.space.near(top)):
            if choice in self.done:
                continue
            guess = self.sketched(choice)
            device, seconds = guess.device * large, guess.seconds * slow
            if device * room > here.device_limit and device > here.device:
                continue
            if fits and seconds > best.seconds * NEARLY:
                continue
            # Where nothing fits yet, what is smaller comes first.
            over = 0.0 if fits else max(device / max(here.device_limit, 1), 0.8)
            found.append((over, seconds, i, choice))
        return [choice for *_, choice in sorted(found)]

    # -- estimates --------------------------------------------------------------------------------

    def _over(self) -> bool:
        late = time.monotonic() - self._begun >= self.limits.seconds
        return late or len(self.done) >= self.limits.trials

    def _estimate(self, choices: Iterable[Choice], above: Estimate | None = None) -> Choice | None:
        """Estimates these, a few at a time; with `above`, until one is better than that.

        What is under way then is waited for, so that nothing is lost.
        """
        waiting = iter(dict.fromkeys(c for c in choices if c not in self.done))
        under_way: dict[Future[Estimate], Choice] = {}
        found: Choice | None = None
        while True:
            while (
                found is None and len(under_way) < self.limits.workers and not self._full(under_way)
            ):
                choice = next(waiting, None)
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
                self.told(len(self.done), self.best)
                bar = self.done[found] if found else above
                if bar and above and is_better(self.done[choice], bar):
                    found = choice

    def _full(self, under_way: dict["Future[Estimate]", Choice]) -> bool:
        begun = len(self.done) + len(under_way)
        busy = len(under_way) >= self.limits.workers
        return busy or self._over() or begun >= self.limits.trials


def _alike(choice: Choice) -> list[object]:
    """Kinds that it is of, the narrowest first."""
    mesh, kept = choice.mesh, (choice.recompute, choice.stage_keeps)
    waits = choice.activations_wait, choice.optimizer_waits, choice.parameters_wait
    return [
        (mesh, kept, waits, choice.stage, choice.sequence),
        (mesh, kept, waits),
        (mesh, waits),
        mesh,
        (kept, waits),
        waits,
        None,
    ]


_RANKS = {"fits": 0, "tight": 1, "does not fit": 2}


def order_of(found: Estimate) -> tuple[float, ...]:
    """What comes first is better: what fits by its time, what does not by what it lacks."""
    if found.refused:
        return (3, 0.0)
    rank = _RANKS[found.fits]
    return (rank, found.over if rank == 2 else found.seconds)


def is_better(found: Estimate, than: Estimate) -> bool:
    """By enough to go on from there."""
    if found.refused:
        return False
    (rank, value), (other, bar) = order_of(found), order_of(than)
    return rank < other or (rank == other and value < bar * BETTER)


def best_of(done: dict[Choice, Estimate]) -> Choice | None:
    """The best choice that is expected to fit, if only just."""
    able = [c for c, found in done.items() if not found.refused and found.fits != "does not fit"]
    return min(able, key=lambda c: order_of(done[c]), default=None)
