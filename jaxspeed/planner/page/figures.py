"""The figures of a plan as HTML elements that can be verified against the embedded JSON.

A number on the page is an element with its source: `data-at` has one or more JSON pointers (RFC
6901) separated by blanks, `data-how` the function of their values (`value`, `sum`, `ratio`,
`difference`, `product`, or `products`, a sum of products of pairs), and `data-form` the format.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspeed.placement.show import bytes_text, scaled_text, seconds_text
from jaxspeed.planner.page.markup import Markup, tag

# -- number formats, by their name in the page -----------------------------------------------------

_LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def count_text(count: float) -> str:
    """`64`, `1,024`, `12.3 million`, `1.01 trillion`."""
    for size, word in _LARGE:
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}" if count >= 1000 or float(count).is_integer() else f"{count:.3g}"


def percent_text(share: float) -> str:
    """`41.3%`, `103%`, and `<0.1%` for small positive shares."""
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

# -- numbers with their JSON pointers --------------------------------------------------------------

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
        """The value at a place, or None."""
        found: Any = self.tree
        for part in place:
            try:
                found = found[part]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def computed(self, how: str, *places: Place) -> float:
        """A number computed from figures."""
        return float(HOW[how]([self.get(*place) for place in places]))

    def shown(self, form: str, *place: str | int) -> Markup:
        """One figure as an element."""
        return self.derived("value", form, place)

    def derived(self, how: str, form: str, *places: Place) -> Markup:
        """A number computed from several figures, as an element."""
        return tag(
            "span",
            FORMS[form](self.computed(how, *places)),
            cls="n",
            data_at=" ".join(map(_pointer, places)),
            data_how=None if how == "value" else how,
            data_form=form,
        )


def _pointer(place: Place) -> str:
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in place)
    return "".join(f"/{part}".replace(" ", "%20") for part in parts)
