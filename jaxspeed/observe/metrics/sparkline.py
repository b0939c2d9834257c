"""A curve in one line of text."""

import itertools
import math
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """At most `width` characters, each the mean of its part of the values; × where none is finite.

    The lowest mean is ▁ and the highest █, so the line tells a shape and no size.
    """
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)] if columns > 0 else []
    means = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return _NOT_FINITE * len(means)
    low, high = min(finite), max(finite)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _NOT_FINITE if mean is None else _LEVELS[round((mean - low) * scale)] for mean in means
    )


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
