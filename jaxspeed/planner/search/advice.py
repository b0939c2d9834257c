"""What to change where a step does not fit: what frees most, and what costs least."""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxspeed.placement.show import bytes_text
from jaxspeed.planner.memory.components import MAY_BE_BELOW
from jaxspeed.planner.search.analytic_cost import Sketched
from jaxspeed.planner.search.candidate import MESH, Choice
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

CHANGES = 3  # of a set, at most
WIDE = 60  # sets of one size that grow into larger ones
SINGLES = 4  # kinds of change that are estimated
SETS, FITTING = 8, 4  # sets that are, and how many of them that fit are enough
EACH = 0.01  # what one change more has to save, of a step


@dataclass(frozen=True)
class Change:
    """Words to set, and what comes of them.

    Attributes:
      words: keys of the config.
      estimate: with them.
      frees: bytes of a device, against the config as it is.
      slower: seconds of a step, against the same; below 0 where it is faster.
      before: seconds of a step, as it is.
    """

    words: Mapping[str, Any]
    estimate: Estimate
    frees: int
    slower: float
    before: float

    @property
    def told(self) -> str:
        """The words as one writes them."""
        return ", ".join(f"{key}: {_shown(value)}" for key, value in self.words.items())


@dataclass(frozen=True)
class Advice:
    """Where a step does not fit: the change that frees most; the fastest few with which it fits."""

    single: Change | None
    cheapest: Change | None

    def lines(self) -> list[str]:
        """For people."""
        return [text for text in (self._single(), self._cheapest()) if text]

    def figures(self) -> dict[str, Any]:
        """As plain numbers and words."""
        one, few = self.single, self.cheapest
        return {
            "single": one
            and {
                "set": dict(one.words),
                "frees": one.frees,
                "device_bytes": one.estimate.device,
                "seconds": one.estimate.seconds or None,
                "text": self._single(),
            },
            "cheapest": few
            and {
                "set": dict(few.words),
                "device_bytes": few.estimate.device,
                "seconds": few.estimate.seconds,
                "slower": few.slower,
                "text": self._cheapest(),
            },
        }

    def _single(self) -> str | None:
        one = self.single
        if one is None:
            return "what would free most: no single change frees anything"
        left = bytes_text(one.estimate.device)
        return f"what would free most: {one.told} frees {bytes_text(one.frees)} ({left} then)"

    def _cheapest(self) -> str | None:
        few = self.cheapest
        if few is None:
            return "no set of changes was found with which it fits: more devices, or larger ones"
        needs = f"{bytes_text(few.estimate.device)} of {bytes_text(few.estimate.device_limit)}"
        tight = ", tight" if few.estimate.fits == "tight" else ""
        apart = few.slower / few.before if few.before else 0.0
        speed = f"{abs(apart):.0%} {'slower' if apart > 0 else 'faster'}"
        speed = "as fast" if abs(apart) < 0.005 else f"a step {speed}"
        return f"what would fit at least cost: {few.told} ({needs}{tight}; {speed})"


@dataclass
class Adviser:
    """Looks for advice: formulas order changes, estimates tell.

    Attributes:
      space: what may be changed.
      sketch: bytes and seconds by formula.
      estimate: of one choice.
      words: that make a choice of the config.
      seconds: after which no more is estimated.
    """

    space: Space
    sketch: Callable[[Choice], Sketched]
    estimate: Callable[[Choice], Estimate]
    words: Callable[[Choice], Mapping[str, Any]]
    seconds: float = 15.0

    def advise(self) -> Advice:
        """Of the space's base, which does not fit."""
        self._began = time.monotonic()
        self._done: dict[Choice, Estimate] = {}
        base = self.space.base
        self._base, self._sketched = self._of(base), self.sketch(base)
        cheapest = self._cheapest()
        return Advice(self._single(), cheapest)

    def _of(self, choice: Choice) -> Estimate:
        if choice not in self._done:
            self._done[choice] = self.estimate(choice)
        return self._done[choice]

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._began > self.seconds

    def _change(self, choice: Choice) -> Change:
        found = self._of(choice)
        frees, slower = self._base.device - found.device, found.seconds - self._base.seconds
        return Change(self.words(choice), found, frees, slower, self._base.seconds)

    def _single(self) -> Change | None:
        """Of each kind of change what frees most by formula; of these what frees most."""
        kinds: dict[str, tuple[float, Choice]] = {}
        for choice in self.space.single(self.space.base):
            device = self.sketch(choice).device
            kind = (
                "mesh" if choice.mesh != self.space.base.mesh else _field(self.space.base, choice)
            )
            if kind not in kinds or device < kinds[kind][0]:
                kinds[kind] = device, choice
        order = heapq.nsmallest(SINGLES, kinds.values(), key=lambda item: item[0])
        able: list[Choice] = []
        for _, choice in order:
            if self._late and able:
                break
            if not self._of(choice).refused and self._host_holds(choice):
                able.append(choice)
        best = min(able, key=lambda c: self._of(c).device, default=None)
        if best is None or self._of(best).device >= self._base.device:
            return None
        return self._change(best)

    def _host_holds(self, choice: Choice) -> bool:
        return self._of(choice).host <= self._of(choice).host_limit

    def _cheapest(self) -> Change | None:
        """The fastest that fits, of the sets that do by formula, and of what was estimated."""
        fitting = 0
        for count, choice in enumerate(self._promising()):
            enough = fitting >= FITTING or (fitting and count >= SETS) or count >= 2 * SETS
            if enough or (self._late and count):
                break
            fitting += self._of(choice).fits == "fits"
        fit = self._fastest()
        return self._change(self._fewest(fit)) if fit else None

    def _fastest(self) -> Choice | None:
        able = [c for c, e in self._done.items() if not e.refused and e.fits != "does not fit"]
        return min(able, key=self._cost, default=None)

    def _cost(self, choice: Choice) -> tuple[bool, float]:
        found, count = self._of(choice), self._count(choice)
        return found.fits != "fits", found.seconds * (1 + EACH * count)

    def _count(self, choice: Choice) -> int:
        """How many changes it is."""
        return len(_changes(self.space.base, choice))

    def _promising(self) -> Iterator[Choice]:
        """Sets of changes that fit by formula, corrected by what is known of the base."""
        large = self._base.device / max(self._sketched.device, 1.0)
        room = self._base.device_limit / (1 + MAY_BE_BELOW)
        found: dict[Choice, tuple[float, float]] = {}
        edge = {self.space.base: 0.0}
        for _ in range(CHANGES):
            grown: dict[Choice, float] = {}
            for at in edge:
                for choice in self.space.single(at):
                    if choice not in found and choice != self.space.base:
                        sketch = self.sketch(choice)
                        over = max(sketch.device * large / room, 1.0)
                        over *= max(sketch.host / self._base.host_limit, 1.0)
                        found[choice] = over, sketch.seconds * (1 + EACH * self._count(choice))
                        grown[choice] = sketch.seconds * over**2
            edge = dict(heapq.nsmallest(WIDE, grown.items(), key=lambda item: item[1]))
        # Nearly fitting sets come after those that fit: formulas are not exact.
        order = sorted(found, key=lambda c: (round(max(found[c][0] - 1.1, 0), 2), found[c][1]))
        return iter(order[: 2 * SETS])

    def _fewest(self, choice: Choice) -> Choice:
        """Without changes that it fits without, where those make it no faster."""
        base = self.space.base
        for kind in _changes(base, choice):
            names = MESH if kind == "mesh" else (kind,)
            less = replace(choice, **{name: getattr(base, name) for name in names})
            if less == base or not self.space.is_in(less):
                continue
            if self._cost(less) <= self._cost(choice) and not self._of(less).refused:
                choice = less
        return choice


def _changes(base: Choice, choice: Choice) -> list[str]:
    """The fields that differ, the mesh as one."""
    found = ["mesh"] if base.mesh != choice.mesh else []
    rest = (f.name for f in fields(Choice) if f.name not in MESH)
    return found + [name for name in rest if getattr(base, name) != getattr(choice, name)]


def _field(base: Choice, choice: Choice) -> str:
    return next(iter(_changes(base, choice)))


def _shown(value: Any) -> str:
    return (
        "taken out"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
