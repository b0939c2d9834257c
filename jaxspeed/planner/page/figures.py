"""The figures of a plan, shown so that each can be held against the JSON that it is from.

A number on the page is an element that says where its value stands: `data-at` has one or more JSON
pointers (RFC 6901) with blanks between them, `data-how` what is made of them (`value`, `sum`,
`ratio`, `difference`, `product`, or `products`, a sum of products of pairs), and `data-form` how it
is written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspeed.planner.page.forms import FORMS
from jaxspeed.planner.page.markup import Markup, tag

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
