"""What a device needs by component, against what it has; host memory and the compiler beside it."""

from collections.abc import Mapping
from typing import Any

from jaxspeed.planner.page import looks
from jaxspeed.planner.page.bars import Bar, Part, stacked
from jaxspeed.planner.page.figures import FORMS, Figures, percent_text
from jaxspeed.planner.page.markup import Children, Markup, section, table, tag

THIN = 0.03  # of N: less is drawn to its own scale
Numbered = tuple[int, Mapping[str, Any]]  # a component and its place in the figures


def memory(figures: Figures) -> Markup | None:
    if figures.get("memory") is None:
        return None
    listed = _in_order(figures.get("memory", "components"))
    keys = {place: str(number) for number, (place, _) in enumerate(listed, start=1)}
    device = [each for each in listed if not each[1]["host"]]
    host = [each for each in listed if each[1]["host"]]
    bars = [_estimate(figures, device, keys), *_compiler(figures)]
    charts = [stacked(bars, "memory of a device")]
    if host:
        charts.append(stacked([_host(figures, host, keys)], "host memory of a device"))
    return section(
        "memory",
        "Memory",
        _lead(figures),
        charts,
        _legend(),
        _table(figures, listed, keys),
        _difference(figures),
    )


def _lead(figures: Figures) -> Children:
    said: list[Children] = [
        "At its fullest moment a device holds ",
        figures.shown("bytes", "memory", "device"),
        ": ",
        figures.shown("bytes", "memory", "state"),
        " that stay from step to step, and ",
        figures.shown("bytes", "memory", "temporary"),
        " that come and go.",
    ]
    if figures.get("pipeline"):
        said.append(
            [
                " All ",
                figures.shown("count", "pipeline", "stages"),
                " stages run one program over arrays of one shape, so one bar is each of them.",
            ]
        )
    return said


def _in_order(components: list[Mapping[str, Any]]) -> list[Numbered]:
    """As they are stacked: what stays first, the largest first; host memory after the device's."""
    return sorted(
        enumerate(components),
        key=lambda each: (each[1]["host"], not each[1]["lasting"], -each[1]["bytes"]),
    )


def _parts(listed: list[Numbered], keys: Mapping[int, str], room: float | None) -> list[Part]:
    parts = []
    for place, found in listed:
        share = f", {percent_text(found['bytes'] / room)} of what there is" if room else ""
        tip = f"{FORMS['bytes'](found['bytes'])}{share}\n{found['formula']}"
        look = looks.component(found["name"], found["lasting"])
        parts.append(Part(found["name"], found["bytes"], look, tip, keys[place]))
    return parts


def _estimate(figures: Figures, listed: list[Numbered], keys: Mapping[int, str]) -> Bar:
    room = figures.get("target", "memory")
    label: list[Children] = ["estimate  ", figures.shown("bytes", "memory", "device")]
    parts = _parts(listed, keys, room)
    if _thin(figures):
        return Bar([*label, "  of ", _n(figures), ", which is too long to draw"], parts)
    return Bar(label, parts, room, _n(figures))


def _n(figures: Figures) -> Children:
    return ["N = ", figures.shown("bytes", "target", "memory")]


def _thin(figures: Figures) -> bool:
    """Whether nothing could be seen of M at the scale of N."""
    needed = max(figures.get("memory", "device"), figures.get("outcome", "device_bytes") or 0)
    return bool(needed < THIN * figures.get("target", "memory"))


def _host(figures: Figures, listed: list[Numbered], keys: Mapping[int, str]) -> Bar:
    room = figures.get("target", "host_memory")
    label: list[Children] = [
        "host memory, for a device  ",
        figures.shown("bytes", "memory", "host"),
    ]
    has: list[Children] = ["of ", figures.shown("bytes", "target", "host_memory")]
    parts = _parts(listed, keys, room)
    if figures.get("memory", "host") < THIN * room:
        return Bar([*label, "  ", *has], parts)
    return Bar(label, parts, room, has)


def _compiler(figures: Figures) -> list[Bar]:
    """The compiler's own figures, where there are any."""
    needed = figures.get("outcome", "device_bytes")
    room = None if _thin(figures) else figures.get("target", "memory")
    if needed is None:
        return []
    label: list[Children] = ["compiler  ", figures.shown("bytes", "outcome", "device_bytes")]
    found = figures.get("compiled")
    if found is None:
        label.append(": refused")
        tip = f"{FORMS['bytes'](needed)}\n{figures.get('outcome', 'refused')}"
        return [Bar(label, [Part("refused", needed, "whole bad", tip)], room)]
    results = found["output_bytes"] - found["alias_bytes"]
    sizes = (
        ("arguments", found["argument_bytes"], "k1", "state and batch"),
        ("temporaries", found["temp_bytes"], "k2 striped", "alive beside them at the most"),
        ("results", results, "k3", "that do not overwrite an argument"),
    )
    parts = [Part(n, size, look, f"{FORMS['bytes'](size)}\n{tip}") for n, size, look, tip in sizes]
    return [Bar(label, parts, room)]


def _legend() -> Markup:
    return tag(
        "p",
        tag("span", tag("i", cls="swatch c12"), "stays from step to step"),
        tag("span", tag("i", cls="swatch c12 striped"), "there at the fullest moment only"),
        cls="legend",
    )


def _table(figures: Figures, listed: list[Numbered], keys: Mapping[int, str]) -> Markup:
    def row(place: int, found: Mapping[str, Any]) -> Markup:
        room = "host_memory" if found["host"] else "memory"
        at = ("memory", "components", place, "bytes")
        look = looks.component(found["name"], found["lasting"])
        return tag(
            "tr",
            tag("td", tag("i", keys[place], cls=f"swatch {look}"), cls="k"),
            tag("th", found["name"], " (host)" if found["host"] else None, scope="row"),
            tag("td", figures.shown("bytes", *at), cls="r"),
            tag("td", figures.derived("ratio", "percent", at, ("target", room)), cls="r"),
            tag("td", tag("code", found["formula"]), cls="formula"),
        )

    return table(
        ("", "component", "r bytes", "r of N", "formula"),
        [row(*each) for each in listed],
        "components",
    )


def _difference(figures: Figures) -> Markup | None:
    if figures.get("outcome", "device_bytes") is None:
        return None
    places = (("memory", "device"), ("outcome", "device_bytes"))
    return tag(
        "p",
        ["The estimate is ", figures.derived("ratio", "percent", *places)],
        [" of what the compiler says, ", figures.shown("bytes", "outcome", "device_bytes")],
        [", in ", figures.shown("seconds", "outcome", "seconds"), " of compiling."],
    )
