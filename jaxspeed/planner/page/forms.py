"""Numbers as people read them, each form by the name that it has in the page."""

from collections.abc import Callable

from jaxspeed.placement.show import bytes_text, scaled_text, seconds_text

_LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


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
