"""What devices send each other: by the estimate with times, and by the compiler with bytes."""

from collections import defaultdict
from typing import Any

from jaxspeed.planner.page import looks
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, folded, section, table, tag

SHOWN = 10  # rows; the rest is folded away


def exchanges(figures: Figures) -> Markup | None:
    estimated = figures.get("time", "exchanges")
    compiled = figures.get("compiled", "collectives")
    if not estimated and not compiled:
        return None
    return section(
        "exchanges",
        "Exchanges",
        _lead(figures) if estimated else None,
        _estimated(figures) if estimated else None,
        _compiled(figures) if compiled else None,
    )


def _lead(figures: Figures) -> Children:
    found = figures.get("time", "exchanges")
    at: list[tuple[str | int, ...]] = [("time", "exchanges", i, "bytes") for i in range(len(found))]
    return ["A device sends ", figures.derived("sum", "bytes", *at), " in a step, by the estimate."]


def _estimated(figures: Figures) -> Markup:
    found: list[dict[str, Any]] = figures.get("time", "exchanges")
    longest = max(each["seconds"] for each in found) or 1.0
    order = sorted(range(len(found)), key=lambda i: -found[i]["seconds"])

    def row(i: int) -> Markup:
        each, at = found[i], ("time", "exchanges", i)
        look = looks.TIME.get(each["link"], "t3")
        return tag(
            "tr",
            tag("th", each["kind"], tag("small", each["what"]), scope="row"),
            tag("td", axes(each["axes"]) or each["link"]),
            tag("td", figures.shown("bytes", *at, "bytes"), cls="r", data_head="sends"),
            tag("td", figures.shown("count", *at, "runs"), cls="r", data_head="runs"),
            tag("td", figures.shown("seconds", *at, "seconds"), cls="r", data_head="takes"),
            tag("td", figures.shown("seconds", *at, "exposed"), cls="r", data_head="exposed"),
            tag("td", _length(each["seconds"], each["exposed"], longest, look), cls="lengths"),
            tag("td", tag("code", each["formula"]), cls="formula"),
        )

    heads = ("what", "along", "r bytes", "r runs", "r time", "r exposed", "", "formula")
    legend = tag(
        "p",
        tag("span", tag("i", cls="swatch t3"), "waited for"),
        tag("span", tag("i", cls="swatch t3 hidden-part"), "behind compute"),
        cls="legend",
    )
    return tag("div", folded(heads, [row(i) for i in order], "exchanges", SHOWN), legend)


def _length(seconds: float, exposed: float, longest: float, look: str) -> Markup:
    shown = min(exposed, seconds)
    return tag(
        "span",
        tag("span", cls=look, style=f"width:{shown / longest:.2%}"),
        tag("span", cls=f"{look} hidden-part", style=f"width:{(seconds - shown) / longest:.2%}"),
        cls="length",
    )


def axes(found: list[str]) -> Children:
    return [
        tag("span", tag("i", cls=f"dot {looks.AXES.get(axis, 'a0')}"), axis, cls="axis")
        for axis in found
    ]


def _compiled(figures: Figures) -> Markup:
    """By kind and axis, most bytes first."""
    by: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    found = figures.get("compiled", "collectives")
    for i, each in enumerate(found):
        by[each["kind"], tuple(each["axis"])].append(i)

    def size(of: list[int]) -> int:
        return sum(found[i]["bytes"] * found[i]["runs"] for i in of)

    most = max(map(size, by.values())) or 1

    def row(kind: str, along: tuple[str, ...], of: list[int]) -> Markup:
        at = ("compiled", "collectives")
        pairs = [(*at, i, name) for i in of for name in ("bytes", "runs")]
        look = looks.AXES.get(along[0], "a0") if along else "a0"
        return tag(
            "tr",
            tag("th", kind, scope="row"),
            tag("td", axes(list(along))),
            tag("td", figures.derived("products", "bytes", *pairs), cls="r"),
            tag("td", figures.derived("sum", "count", *pairs[1::2]), cls="r"),
            tag("td", _length(size(of), size(of), most, look), cls="lengths"),
        )

    heads = ("compiled to", "along", "r payload", "r runs", "")
    order = sorted(by.items(), key=lambda item: -size(item[1]))
    rows = [row(kind, along, of) for (kind, along), of in order]
    return tag("div", tag("h3", "In the compiled step"), table(heads, rows, "collectives"))
