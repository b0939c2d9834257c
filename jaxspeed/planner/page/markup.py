"""HTML from nested calls, with text escaped: elements, sections, tables."""

import html
from collections.abc import Iterable, Iterator
from typing import Any

VOID = {"meta", "link", "br", "col"}
Children = Any  # text, markup, None, or an iterable of them


class Markup(str):
    """Text that is already HTML."""


def tag(name: str, /, *children: Children, **attributes: Any) -> Markup:
    """An element. `cls` is its class, `data_x` becomes `data-x`; None omits an attribute."""
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


def section(name: str, title: str, lead: Children, *content: Children) -> Markup:
    """A section of the page, with its heading."""
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        tag("p", lead, cls="lead") if lead else None,
        join(*content),
        id=name,
        aria_labelledby=f"{name}-title",
    )


def table(heads: tuple[str, ...], rows: Children, cls: str) -> Markup:
    """A table; a head that starts with "r " marks a column of numbers."""
    cells = (
        tag("th", head[2:], scope="col", cls="r")
        if head.startswith("r ")
        else tag("th", head, scope="col")
        for head in heads
    )
    body = join(tag("thead", tag("tr", list(cells))), tag("tbody", rows))
    return tag("div", tag("table", body, cls=cls), cls="wide")


def collapsible(heads: tuple[str, ...], rows: list[Markup], cls: str, shown: int) -> Markup:
    """A table whose later rows are collapsed."""
    first = table(heads, rows[:shown], cls)
    if len(rows) <= shown:
        return first
    rest = table(heads, rows[shown:], cls)
    return tag("div", first, tag("details", tag("summary", f"{len(rows) - shown} more"), rest))
