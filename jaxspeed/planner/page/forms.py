"""Numbers as people read them, each form by the name that it has in the page."""

from collections.abc import Callable

from jaxspeed.placement.show import bytes_text, scaled_text

_LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
_LONG = ((86400.0, "days", 2), (3600.0, "h", 2), (60.0, "min", 2))


def seconds_text(seconds: float) -> str:
    """`216 µs`, `12.3 ms`, `1.24 s`, `3.4 min`."""
    for size, unit, least in _LONG:
        if seconds >= least * size:
            return f"{seconds / size:.3g} {unit}"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    if 0 < seconds < 1e-9:
        return "<1 ns"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def count_text(count: float) -> str:
    """`64`, `1,024`, `12.3 million`, `1.01 trillion`."""
    for size, word in _LARGE:
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}" if count >= 1000 or float(count).is_integer() else f"{count:.3g}"


def percent_text(share: float) -> str:
    """`41.3%`, `103%`, and `<0.1%` of what is not nothing."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.{0 if share >= 0.995 or share == 0 else 1}%}"


FORMS: dict[str, Callable[[float], str]] = {
    "bytes": bytes_text,
    "bytes a second": lambda rate: f"{bytes_text(rate)}/s",
    "seconds": seconds_text,
    "count": count_text,
    "percent": percent_text,
    "flops": lambda flops: scaled_text(flops, "FLOP"),
    "flops a second": lambda rate: scaled_text(rate, "FLOP/s"),
}
