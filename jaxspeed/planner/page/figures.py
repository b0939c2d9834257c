"""The figures of a plan, shown so that each can be held against the JSON that it is from.

A number on the page is an element that says where its value stands: `data-at` has one or more JSON
pointers (RFC 6901) with blanks between them, `data-how` what is made of them (`value`, `sum`,
`ratio`, `difference`, `product`, or `products`, a sum of products of pairs), and `data-form` how it
is written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspeed.placement.show import bytes_text, scaled_text
from jaxspeed.planner.page.markup import Markup, tag

# -- numbers as people read them, each form by the name that it has in the page -------------------

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

# -- numbers with their places ---------------------------------------------------------------------

Place = tuple[str | int, ...]  # in the tree of figures

HOW: dict[str, Callable[[Sequence[float]], float]] = {
    "value": lambda found: found[0],
    "sum": sum,
    "ratio": lambda found: found[0] / found[1],
    "difference": lambda found: found[0] - found[1],
    "product": math.prod,
    "products": lambda found: sum(a * b for a, b in zip(found[::2], found[1::2], strict=True)),
}


class Figures:
    """The tree that `--json` prints."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree

    def get(self, *place: str | int) -> Any:
        """What stands at a place, None where nothing does."""
        found: Any = self.tree
        for part in place:
            try:
                found = found[part]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def made(self, how: str, *places: Place) -> float:
        """A number made of others."""
        return float(HOW[how]([self.get(*place) for place in places]))

    def shown(self, form: str, *place: str | int) -> Markup:
        """One figure."""
        return self.derived("value", form, place)

    def derived(self, how: str, form: str, *places: Place) -> Markup:
        """A number made of several figures."""
        return tag(
            "span",
            FORMS[form](self.made(how, *places)),
            cls="n",
            data_at=" ".join(map(_pointer, places)),
            data_how=None if how == "value" else how,
            data_form=form,
        )


def _pointer(place: Place) -> str:
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in place)
    return "".join(f"/{part}".replace(" ", "%20") for part in parts)
