"""From figures to places along a line, with round figures marked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FAR = 12.0  # from the least to the most: beyond that places are those of logarithms


@dataclass(frozen=True)
class Scale:
    """Places from 0 to 1 of figures from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float], whole: bool = True) -> Scale:
    """Of all these: from 0, or where not `whole` from the least; by logarithms if they are far
    apart."""
    least, most = min(values), max(values)
    if least > 0 and most / least > _FAR:
        low, high = least / 1.15, most * 1.15
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = range(first, last + 1)
        steps = (1, 2, 5) if last - first <= 2 else (1,)
        made = (step * 10.0**power for power in powers for step in steps)
        return Scale(low, high, True, tuple(t for t in made if low <= t <= high))
    low, high = 0.0, (most * 1.08 or 1.0)
    if not whole:
        beside = 0.05 * (most - least) or 0.5 * most or 1.0
        low, high = max(0.0, least - beside), most + beside
    step = _round((high - low) / 5)
    first_tick = math.ceil(low / step)
    return Scale(low, high, False, tuple(step * n for n in range(first_tick, int(high / step) + 1)))


def _round(step: float) -> float:
    """The next of 1, 2, 5, 10, ... that is no less."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * 0.999)
