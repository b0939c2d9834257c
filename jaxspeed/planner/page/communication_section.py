"""Page section: communication of a step, estimated with times and compiled with bytes."""

from collections import defaultdict
from typing import Any

from jaxspeed.planner.page import styles
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, collapsible, section, table, tag

SHOWN = 10  # rows; the rest is collapsed


def communication(figures: Figures) -> Markup | None:
    estimated = figures.get("time", "exchanges")
    compiled = figures.get("compiled", "collectives")
    if not estimated and not compiled:
        return None
    return section(
        "exchanges",
        "Communication",
        _lead(figures) if estimated else None,
        _estimated(figures) if estimated else None,
        _compiled(figures) if compiled else None,
    )


def _lead(figures: Figures) -> Children:
    found = figures.get("time", "exchanges")
    at: list[tuple[str | int, ...]] = [("time", "exchanges", i, "bytes") for i in range(len(found))]
    return ["Each device sends ", figures.derived("sum", "bytes", *at), " per step (estimate)."]


def _estimated(figures: Figures) -> Markup:
    found: list[dict[str, Any]] = figures.get("time", "exchanges")
    longest = max(each["seconds"] for each in found) or 1.0
    order = sorted(range(len(found)), key=lambda i: -found[i]["seconds"])

    def row(i: int) -> Markup:
        each, at = found[i], ("time", "exchanges", i)
        style = styles.TIME.get(each["link"], "t3")
        return tag(
            "tr",
            tag("th", each["kind"], tag("small", each["what"]), scope="row"),
            tag("td", axes(each["axes"]) or each["link"]),
            tag("td", figures.shown("bytes", *at, "bytes"), cls="r", data_head="sends"),
            tag("td", figures.shown("count", *at, "runs"), cls="r", data_head="runs"),
            tag("td", figures.shown("seconds", *at, "seconds"), cls="r", data_head="time"),
            tag("td", figures.shown("seconds", *at, "exposed"), cls="r", data_head="exposed"),
            tag("td", _length(each["seconds"], each["exposed"], longest, style), cls="lengths"),
            tag("td", tag("code", each["formula"]), cls="formula"),
        )

    heads = ("communication", "over", "r bytes", "r runs", "r time", "r exposed", "", "formula")
    legend = tag(
        "p",
        tag("span", tag("i", cls="swatch t3"), "exposed"),
        tag("span", tag("i", cls="swatch t3 hidden-part"), "overlapped with compute"),
        cls="legend",
    )
    return tag("div", collapsible(heads, [row(i) for i in order], "exchanges", SHOWN), legend)


def _length(seconds: float, exposed: float, longest: float, style: str) -> Markup:
    shown = min(exposed, seconds)
    return tag(
        "span",
        tag("span", cls=style, style=f"width:{shown / longest:.2%}"),
        tag("span", cls=f"{style} hidden-part", style=f"width:{(seconds - shown) / longest:.2%}"),
        cls="length",
    )


def axes(found: list[str]) -> Children:
    return [
        tag("span", tag("i", cls=f"dot {styles.AXES.get(axis, 'a0')}"), axis, cls="axis")
        for axis in found
    ]


def _compiled(figures: Figures) -> Markup:
    """Compiled collectives by kind and axis, most bytes first."""
    by: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    found = figures.get("compiled", "collectives")
    for i, each in enumerate(found):
        by[each["kind"], tuple(each["axis"])].append(i)

    def size(of: list[int]) -> int:
        return sum(found[i]["bytes"] * found[i]["runs"] for i in of)

    most = max(map(size, by.values())) or 1

    def row(kind: str, over: tuple[str, ...], of: list[int]) -> Markup:
        at = ("compiled", "collectives")
        pairs = [(*at, i, name) for i in of for name in ("bytes", "runs")]
        style = styles.AXES.get(over[0], "a0") if over else "a0"
        return tag(
            "tr",
            tag("th", kind, scope="row"),
            tag("td", axes(list(over))),
            tag("td", figures.derived("products", "bytes", *pairs), cls="r"),
            tag("td", figures.derived("sum", "count", *pairs[1::2]), cls="r"),
            tag("td", _length(size(of), size(of), most, style), cls="lengths"),
        )

    heads = ("collective", "over", "r payload", "r runs", "")
    order = sorted(by.items(), key=lambda item: -size(item[1]))
    rows = [row(kind, over, of) for (kind, over), of in order]
    return tag(
        "div", tag("h3", "Collectives of the compiled step"), table(heads, rows, "collectives")
    )
