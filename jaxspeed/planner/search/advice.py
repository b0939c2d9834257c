"""Advice for a step that does not fit: the largest saving, and the cheapest change that fits."""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.placement.show import bytes_text
from jaxspeed.planner.memory.components import MAY_BE_BELOW
from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import Choice, changes
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.space import Space

MAX_CHANGES = 3  # in a set
BEAM_WIDTH = 60  # sets of one size that are extended
SINGLES = 4  # kinds of single change that are estimated
SETS, FITTING = 8, 4  # sets that are estimated; of these, fitting ones that are enough
MIN_GAIN = 0.01  # fraction of a step that one more change has to save


@dataclass(frozen=True)
class Change:
    """Config keys to set, and their effect.

    Attributes:
      keys: {config key: value}; None removes the key.
      estimate: with the change.
      frees: bytes per device, relative to the current config.
      slower: seconds per step, relative to the current config; below 0 if faster.
      before: seconds per step of the current config.
    """

    keys: Mapping[str, Any]
    estimate: Estimate
    frees: int
    slower: float
    before: float

    @property
    def text(self) -> str:
        """The keys as one writes them."""
        return ", ".join(f"{key}: {_shown(value)}" for key, value in self.keys.items())


@dataclass(frozen=True)
class Advice:
    """The single change that frees most, and the cheapest set of changes that fits."""

    single: Change | None
    cheapest: Change | None

    def lines(self) -> list[str]:
        """The advice as text."""
        return [text for text in (self._single(), self._cheapest()) if text]

    def figures(self) -> dict[str, Any]:
        """The advice as JSON values."""
        change, few = self.single, self.cheapest
        return {
            "single": change
            and {
                "set": dict(change.keys),
                "frees": change.frees,
                "device_bytes": change.estimate.device,
                "seconds": change.estimate.seconds or None,
                "text": self._single(),
            },
            "cheapest": few
            and {
                "set": dict(few.keys),
                "device_bytes": few.estimate.device,
                "seconds": few.estimate.seconds,
                "slower": few.slower,
                "text": self._cheapest(),
            },
        }

    def _single(self) -> str | None:
        change = self.single
        if change is None:
            return "largest saving: no single change frees memory"
        left = bytes_text(change.estimate.device)
        return f"largest saving: {change.text} frees {bytes_text(change.frees)} ({left} remain)"

    def _cheapest(self) -> str | None:
        few = self.cheapest
        if few is None:
            return "no set of changes was found that fits: use more or larger devices"
        needs = f"{bytes_text(few.estimate.device)} of {bytes_text(few.estimate.device_limit)}"
        tight = ", tight" if few.estimate.fits == "tight" else ""
        apart = few.slower / few.before if few.before else 0.0
        speed = f"{abs(apart):.0%} {'slower' if apart > 0 else 'faster'}"
        speed = "as fast" if abs(apart) < 0.005 else f"step {speed}"
        return f"cheapest change that fits: {few.text} ({needs}{tight}; {speed})"


@dataclass
class Adviser:
    """Search for advice: analytic costs order the changes, estimates decide.

    Attributes:
      space: the changes that are allowed.
      analytic_cost: bytes and seconds by formula.
      estimate: the estimate of one choice.
      keys: the config keys that turn the config into a choice.
      seconds: after which no more is estimated.
    """

    space: Space
    analytic_cost: Callable[[Choice], AnalyticCost]
    estimate: Callable[[Choice], Estimate]
    keys: Callable[[Choice], Mapping[str, Any]]
    seconds: float = 15.0

    def advise(self) -> Advice:
        """The advice for the space's base, which does not fit."""
        self._began = time.monotonic()
        self._done: dict[Choice, Estimate] = {}
        base = self.space.base
        self._base, self._base_cost = self._of(base), self.analytic_cost(base)
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
        estimate = self._of(choice)
        frees, slower = self._base.device - estimate.device, estimate.seconds - self._base.seconds
        return Change(self.keys(choice), estimate, frees, slower, self._base.seconds)

    def _single(self) -> Change | None:
        """The change that frees most, of those that do by formula for each kind of change."""
        kinds: dict[str, tuple[float, Choice]] = {}
        for choice in self.space.single(self.space.base):
            device = self.analytic_cost(choice).device
            kind = changes(self.space.base, choice)[0]
            if kind not in kinds or device < kinds[kind][0]:
                kinds[kind] = device, choice
        order = heapq.nsmallest(SINGLES, kinds.values(), key=lambda item: item[0])
        able: list[Choice] = []
        for _, choice in order:
            if self._late and able:
                break
            estimate = self._of(choice)
            if not estimate.refused and estimate.host <= estimate.host_limit:
                able.append(choice)
        best = min(able, key=lambda c: self._of(c).device, default=None)
        if best is None or self._of(best).device >= self._base.device:
            return None
        return self._change(best)

    def _cheapest(self) -> Change | None:
        """The fastest set that fits, of those that fit by formula and of all estimated ones."""
        fitting = 0
        for count, choice in enumerate(self._promising()):
            enough = fitting >= FITTING or (fitting and count >= SETS) or count >= 2 * SETS
            if enough or (self._late and count):
                break
            fitting += self._of(choice).fits == "fits"
        able = [c for c, e in self._done.items() if not e.refused and e.fits != "does not fit"]
        fit = min(able, key=self._cost, default=None)
        return self._change(self._fewest(fit)) if fit else None

    def _cost(self, choice: Choice) -> tuple[bool, float]:
        estimate = self._of(choice)
        return estimate.fits != "fits", estimate.seconds * self._effort(choice)

    def _effort(self, choice: Choice) -> float:
        """The factor of a step's time by which changes count."""
        return 1 + MIN_GAIN * len(changes(self.space.base, choice))

    def _promising(self) -> Iterator[Choice]:
        """Sets of changes that fit by formula, corrected by the base's estimate."""
        large = self._base.device / max(self._base_cost.device, 1.0)
        room = self._base.device_limit / (1 + MAY_BE_BELOW)
        costs: dict[Choice, tuple[float, float]] = {}
        edge = {self.space.base: 0.0}
        for _ in range(MAX_CHANGES):
            grown: dict[Choice, float] = {}
            for at in edge:
                for choice in self.space.single(at):
                    if choice not in costs and choice != self.space.base:
                        cost = self.analytic_cost(choice)
                        over = max(cost.device * large / room, 1.0)
                        over *= max(cost.host / self._base.host_limit, 1.0)
                        costs[choice] = over, cost.seconds * self._effort(choice)
                        grown[choice] = cost.seconds * over**2
            edge = dict(heapq.nsmallest(BEAM_WIDTH, grown.items(), key=lambda item: item[1]))
        # Sets that nearly fit come after those that fit: formulas are not exact.
        order = sorted(costs, key=lambda c: (round(max(costs[c][0] - 1.1, 0), 2), costs[c][1]))
        return iter(order[: 2 * SETS])

    def _fewest(self, choice: Choice) -> Choice:
        """Remove changes that are not needed to fit and do not make it faster."""
        base = self.space.base
        for kind in changes(base, choice):
            less = replace(choice, **{kind: getattr(base, kind)})
            if less == base or not self.space.is_in(less):
                continue
            if self._cost(less) <= self._cost(choice) and not self._of(less).refused:
                choice = less
        return choice


def _shown(value: Any) -> str:
    if value is None:
        return "removed"
    return str(value).lower() if isinstance(value, bool) else str(value)
