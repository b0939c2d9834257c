"""Page section: a search, as a scatter plot of step time and memory and a table of candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.placement.show import bytes_text, seconds_text
from jaxspeed.planner.page.advice_section import setting
from jaxspeed.planner.page.figures import Figures, percent_text
from jaxspeed.planner.page.markup import Children, Markup, collapsible, section, tag

HEIGHT = 340
FITS = {"fits": "fits", "tight": "tight", "does not fit": "no"}
SHOWN = 15  # rows; the rest is collapsed
_FAR = 12.0  # ratio of maximum and minimum above which a scale is logarithmic


def search(figures: Figures) -> Markup | None:
    if not figures.get("search", "candidates"):
        return None
    return section(
        "search",
        "Search",
        _lead(figures),
        _scatter(figures),
        _legend(),
        _table(figures),
    )


def _lead(figures: Figures) -> Children:
    text: list[Children] = [
        figures.shown("count", "search", "tried"),
        " configs with global batch ",
    ]
    text += [figures.shown("count", "search", "global_batch"), " estimated in "]
    text += [figures.shown("seconds", "search", "seconds"), "."]
    best = figures.get("search", "best")
    if best is None:
        return [*text, " None of them fits."]
    at = ("search", "candidates", best)
    return [
        *text,
        " Best: ",
        tag("b", figures.get(*at, "name")),
        ", ",
        figures.shown("seconds", *at, "seconds"),
        " per step and ",
        figures.shown("bytes", *at, "device_bytes"),
        " per device.",
    ]


def _scatter(figures: Figures) -> Markup:
    found = figures.get("search", "candidates")
    room = figures.get("target", "memory")
    across = scale_of([each["seconds"] for each in found], from_zero=False)
    up = scale_of([*(each["device_bytes"] for each in found), *([room] if room else [])])
    best = figures.get("search", "best")
    order = sorted(range(len(found)), key=lambda i: i == best)  # the best last, on top
    points = [_point(found[i], across, up, i == best) for i in order]
    lines = [*_grid(across, up)]
    if room:
        y = _y(up, room)
        lines.append(tag("line", x1="0", x2="100%", y1=y, y2=y, cls="n-line"))
        text = f"{bytes_text(room)} available"
        lines.append(tag("text", text, x="99.5%", y=y, dy=-6, cls="n-text", text_anchor="end"))
    svg = tag("svg", lines, points, width="100%", height=HEIGHT, role="group", aria_label="search")
    return tag(
        "div",
        tag("span", "memory per device", cls="y-title"),
        tag("div", tag("div", _ticks_up(up), cls="y-ticks"), svg, cls="plot"),
        tag("div", _ticks_across(across), cls="x-ticks"),
        tag("span", "step time (left is faster)", cls="x-title"),
        cls="scatter",
    )


@dataclass(frozen=True)
class Scale:
    """A mapping of [low, high] to [0, 1]."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float], from_zero: bool = True) -> Scale:
    """The scale of these values, from 0 or from the minimum; logarithmic if they are far apart."""
    least, most = min(values), max(values)
    if least > 0 and most / least > _FAR:
        low, high = least / 1.15, most * 1.15
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = range(first, last + 1)
        steps = (1, 2, 5) if last - first <= 2 else (1,)
        made = (step * 10.0**power for power in powers for step in steps)
        return Scale(low, high, True, tuple(t for t in made if low <= t <= high))
    low, high = 0.0, (most * 1.08 or 1.0)
    if not from_zero:
        margin = 0.05 * (most - least) or 0.5 * most or 1.0
        low, high = max(0.0, least - margin), most + margin
    step = _round((high - low) / 5)
    first_tick = math.ceil(low / step)
    return Scale(low, high, False, tuple(step * n for n in range(first_tick, int(high / step) + 1)))


def _round(step: float) -> float:
    """Round up to 1, 2, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * 0.999)


def _x(across: Scale, seconds: float) -> str:
    return f"{2 + 96 * across.at(seconds):.2f}%"


def _y(up: Scale, size: float) -> str:
    return f"{96 - 92 * up.at(size):.2f}%"


def _grid(across: Scale, up: Scale) -> list[Markup]:
    rows = [tag("line", x1=0, x2="100%", y1=_y(up, t), y2=_y(up, t), cls="grid") for t in up.ticks]
    columns = [
        tag("line", x1=_x(across, t), x2=_x(across, t), y1=0, y2="100%", cls="grid")
        for t in across.ticks
    ]
    return rows + columns


def _ticks_up(up: Scale) -> list[Markup]:
    return [tag("span", bytes_text(t), style=f"top:{_y(up, t)}") for t in up.ticks]


def _ticks_across(across: Scale) -> list[Markup]:
    return [tag("span", seconds_text(t), style=f"left:{_x(across, t)}") for t in across.ticks]


def _point(each: dict[str, Any], across: Scale, up: Scale, best: bool) -> Markup:
    x, y = _x(across, each["seconds"]), _y(up, each["device_bytes"])
    tip = _tip(each, best)
    style = FITS[each["fits"]]
    shape: list[Markup]
    if style == "no":  # a hollow point
        shape = [tag("circle", cx=x, cy=y, r=4, cls="point no")]
    elif style == "tight":
        shape = [
            tag("circle", cx=x, cy=y, r=5, cls="point tight"),
            tag("circle", cx=x, cy=y, r=2, cls="core"),
        ]
    else:
        shape = [tag("circle", cx=x, cy=y, r=5, cls="point fits")]
    if best:
        shape = [tag("circle", cx=x, cy=y, r=11, cls="ring"), *shape]
    return tag("g", shape, tabindex=0, role="img", aria_label=tip.replace("\n", ", "), data_tip=tip)


def _tip(each: dict[str, Any], best: bool) -> str:
    lines = [
        each["name"],
        f"{seconds_text(each['seconds'])} per step, MFU {percent_text(each['mfu'])}",
        f"{bytes_text(each['device_bytes'])} per device: {each['fits']}",
    ]
    return "\n".join([*lines, "best" if best else each.get("lost") or ""]).strip()


def _legend() -> Markup:
    def mark(style: str) -> Markup:
        circle = tag("circle", cx=7, cy=7, r=4.5, cls=f"point {style}")
        core = tag("circle", cx=7, cy=7, r=2, cls="core") if style == "tight" else None
        return tag("svg", circle, core, width=14, height=14, aria_hidden="true")

    best = tag("svg", tag("circle", cx=7, cy=7, r=6, cls="ring"), width=14, height=14)
    names = (("fits", "fits"), ("tight", "tight"), ("no", "does not fit"))
    return tag(
        "p",
        [tag("span", mark(style), f" {name}") for style, name in names],
        tag("span", best, " best"),
        cls="legend",
    )


def _table(figures: Figures) -> Markup:
    found = figures.get("search", "candidates")
    rows = [_row(figures, i) for i in range(len(found))]
    heads = ("", "candidate", "r step", "r tokens/s", "r MFU", "r device", "r host", "reason")
    return collapsible(heads, rows, "candidates", SHOWN)


def _row(figures: Figures, i: int) -> Markup:
    at = ("search", "candidates", i)
    each = figures.get(*at)
    best = figures.get("search", "best") == i
    proved = None
    if each.get("compiled"):
        size = figures.shown("bytes", *at, "compiled", "device_bytes")
        proved = tag("small", "compiled: ", size, f", {each['compiled']['fits']}")
    host = figures.shown("bytes", *at, "host_bytes") if each["host_bytes"] else None
    sets = [tag("code", setting(k, v)) for k, v in (each.get("set") or {}).items()]
    name: Children = each["name"]
    if sets:
        name = tag("details", tag("summary", each["name"]), tag("div", sets, cls="sets"))
    return tag(
        "tr",
        tag("td", tag("i", cls=f"fit {FITS[each['fits']]}", title=each["fits"]), cls="k"),
        tag("th", name, tag("em", "best") if best else None, scope="row"),
        tag("td", figures.shown("seconds", *at, "seconds"), cls="r", data_head="step"),
        tag("td", figures.shown("count", *at, "tokens_per_second"), cls="r", data_head="tokens/s"),
        tag("td", figures.shown("percent", *at, "mfu"), cls="r", data_head="MFU"),
        tag("td", figures.shown("bytes", *at, "device_bytes"), proved, cls="r", data_head="device"),
        tag("td", host, cls="r", data_head="host" if host else None),
        tag("td", each.get("lost") or each["fits"], cls="formula"),
        cls="best" if best else None,
    )
