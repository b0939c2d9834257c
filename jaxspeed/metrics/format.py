"""Format counts, durations and losses as short text; sparklines."""

import itertools
import math
from collections.abc import Sequence


def count_text(value: float) -> str:
    """Three significant digits with a suffix: 1234567 as 1.23M."""
    if not math.isfinite(value):
        return str(value)
    for suffix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or suffix == "T":
            break
        value /= 1000
    digits = 0 if not suffix and value == round(value) else 3 - len(str(int(abs(value) + 0.5)))
    return f"{value:.{max(digits, 0)}f}{suffix}"


def clock_text(seconds: float) -> str:
    """Clock notation: 0:42, 12:05, 3:12:45, 2d 03:12."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def duration_text(seconds: float) -> str:
    """Seconds as 0.42 s or 12.3 s; clock notation from ten minutes on."""
    if seconds >= 600:
        return clock_text(seconds)
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


def loss_text(loss: float) -> str:
    """Four digits; scientific notation below 0.001 and from 1e5 on."""
    if not math.isfinite(loss):
        return str(loss)
    if abs(loss) >= 99999.5 or 0 < abs(loss) < 0.001:
        return f"{loss:.2e}"
    before = len(str(int(abs(loss)))) if abs(loss) >= 1 else 0
    return f"{loss:.{max(0, 4 - before)}f}"


# -- a curve in one line of text ------------------------------------------------------------------

_LEVELS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """At most `width` characters, each the mean of a range of values; × if none of it is finite.

    The lowest mean is ▁ and the highest █: the line shows the shape, not the magnitude.
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
