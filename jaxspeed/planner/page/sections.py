"""What sections share: their heading, and tables."""

from jaxspeed.planner.page.markup import Children, Markup, join, tag


def section(name: str, title: str, lead: Children, *content: Children) -> Markup:
    """A part of the page, with its heading."""
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        tag("p", lead, cls="lead") if lead else None,
        join(*content),
        id=name,
        aria_labelledby=f"{name}-title",
    )


def table(heads: tuple[str, ...], rows: Children, cls: str) -> Markup:
    """A table; a head that begins with "r " is of a column of numbers."""
    cells = (
        tag("th", head[2:], scope="col", cls="r")
        if head.startswith("r ")
        else tag("th", head, scope="col")
        for head in heads
    )
    body = join(tag("thead", tag("tr", list(cells))), tag("tbody", rows))
    return tag("div", tag("table", body, cls=cls), cls="wide")


def folded(heads: tuple[str, ...], rows: list[Markup], cls: str, shown: int) -> Markup:
    """A table whose later rows are folded away."""
    first = table(heads, rows[:shown], cls)
    if len(rows) <= shown:
        return first
    rest = table(heads, rows[shown:], cls)
    return tag("div", first, tag("details", tag("summary", f"{len(rows) - shown} more"), rest))
