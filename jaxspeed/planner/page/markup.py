"""HTML made of nested calls; what is not markup already is escaped."""

import html
from collections.abc import Iterable, Iterator
from typing import Any

VOID = {"meta", "link", "br", "col"}
Children = Any  # text, markup, None, or an iterable of them


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: Children, **attributes: Any) -> Markup:
    """An element. `cls` is its class, `data_x` becomes `data-x`; None leaves an attribute out."""
    words = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = "class" if key == "cls" else key.replace("_", "-")
        words.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    head = f"<{name}{''.join(words)}>"
    return Markup(head if name in VOID else f"{head}{join(*children)}</{name}>")


def join(*children: Children) -> Markup:
    """Siblings."""
    return Markup("".join(_texts(children)))


def _texts(children: Iterable[Children]) -> Iterator[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str | int | float):
            yield html.escape(str(child))
        else:
            yield from _texts(child)
