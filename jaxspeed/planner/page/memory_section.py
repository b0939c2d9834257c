"""Page section: memory per device by component and its limit; host memory; compiler's figures."""

from collections.abc import Mapping
from typing import Any

from jaxspeed.planner.page import styles
from jaxspeed.planner.page.bars import Bar, BarPart, stacked
from jaxspeed.planner.page.figures import FORMS, Figures, percent_text
from jaxspeed.planner.page.markup import Children, Markup, section, table, tag

THIN = 0.03  # of the available memory: less is drawn without that limit
Numbered = tuple[int, Mapping[str, Any]]  # a component and its place in the figures


def memory(figures: Figures) -> Markup | None:
    if figures.get("memory") is None:
        return None
    listed = _in_order(figures.get("memory", "components"))
    keys = {place: str(number) for number, (place, _) in enumerate(listed, start=1)}
    device = [each for each in listed if not each[1]["host"]]
    host = [each for each in listed if each[1]["host"]]
    bars = [_estimate(figures, device, keys), *_compiler(figures)]
    charts = [stacked(bars, "memory per device")]
    if host:
        charts.append(stacked([_host(figures, host, keys)], "host memory per device"))
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
        "Peak memory per device is ",
        figures.shown("bytes", "memory", "device"),
        ": ",
        figures.shown("bytes", "memory", "state"),
        " of state and ",
        figures.shown("bytes", "memory", "temporary"),
        " of temporaries.",
    ]
    if figures.get("pipeline"):
        said.append(
            [
                " All ",
                figures.shown("count", "pipeline", "stages"),
                " stages run one program on arrays of the same shapes and need the same memory.",
            ]
        )
    return said


def _in_order(components: list[Mapping[str, Any]]) -> list[Numbered]:
    """Stacking order: state first, the largest first; host memory after device memory."""
    return sorted(
        enumerate(components),
        key=lambda each: (each[1]["host"], not each[1]["lasting"], -each[1]["bytes"]),
    )


def _parts(listed: list[Numbered], keys: Mapping[int, str], room: float | None) -> list[BarPart]:
    parts = []
    for place, found in listed:
        share = f", {percent_text(found['bytes'] / room)} of the available memory" if room else ""
        tip = f"{FORMS['bytes'](found['bytes'])}{share}\n{found['formula']}"
        cls = styles.component(found["name"], found["lasting"])
        parts.append(BarPart(found["name"], found["bytes"], cls, tip, keys[place]))
    return parts


def _estimate(figures: Figures, listed: list[Numbered], keys: Mapping[int, str]) -> Bar:
    room = figures.get("target", "memory")
    label: list[Children] = ["estimate  ", figures.shown("bytes", "memory", "device")]
    parts = _parts(listed, keys, room)
    if _thin(figures):
        return Bar([*label, "  of ", _available(figures), " (not drawn)"], parts)
    return Bar(label, parts, room, _available(figures))


def _available(figures: Figures) -> Children:
    return [figures.shown("bytes", "target", "memory"), " available"]


def _thin(figures: Figures) -> bool:
    """Whether the bar would be invisible at the scale of the available memory."""
    needed = max(figures.get("memory", "device"), figures.get("outcome", "device_bytes") or 0)
    return bool(needed < THIN * figures.get("target", "memory"))


def _host(figures: Figures, listed: list[Numbered], keys: Mapping[int, str]) -> Bar:
    room = figures.get("target", "host_memory")
    label: list[Children] = [
        "host memory per device  ",
        figures.shown("bytes", "memory", "host"),
    ]
    has: list[Children] = [figures.shown("bytes", "target", "host_memory"), " available"]
    parts = _parts(listed, keys, room)
    if figures.get("memory", "host") < THIN * room:
        return Bar([*label, "  of ", *has], parts)
    return Bar(label, parts, room, has)


def _compiler(figures: Figures) -> list[Bar]:
    """The compiler's figures, if any."""
    needed = figures.get("outcome", "device_bytes")
    room = None if _thin(figures) else figures.get("target", "memory")
    if needed is None:
        return []
    label: list[Children] = ["compiler  ", figures.shown("bytes", "outcome", "device_bytes")]
    found = figures.get("compiled")
    if found is None:
        label.append(": rejected")
        tip = f"{FORMS['bytes'](needed)}\n{figures.get('outcome', 'refused')}"
        return [Bar(label, [BarPart("rejected", needed, "single bad", tip)], room)]
    outputs = found["output_bytes"] - found["alias_bytes"]
    sizes = (
        ("arguments", found["argument_bytes"], "k1", "state and batch"),
        ("temporaries", found["temp_bytes"], "k2 striped", "at the peak"),
        ("outputs", outputs, "k3", "that do not alias an argument"),
    )
    parts = [BarPart(n, size, cls, f"{FORMS['bytes'](size)}\n{tip}") for n, size, cls, tip in sizes]
    return [Bar(label, parts, room)]


def _legend() -> Markup:
    return tag(
        "p",
        tag("span", tag("i", cls="swatch c12"), "state, persists between steps"),
        tag("span", tag("i", cls="swatch c12 striped"), "temporary, at the peak"),
        cls="legend",
    )


def _table(figures: Figures, listed: list[Numbered], keys: Mapping[int, str]) -> Markup:
    def row(place: int, found: Mapping[str, Any]) -> Markup:
        room = "host_memory" if found["host"] else "memory"
        at = ("memory", "components", place, "bytes")
        cls = styles.component(found["name"], found["lasting"])
        return tag(
            "tr",
            tag("td", tag("i", keys[place], cls=f"swatch {cls}"), cls="k"),
            tag("th", found["name"], " (host)" if found["host"] else None, scope="row"),
            tag("td", figures.shown("bytes", *at), cls="r"),
            tag("td", figures.derived("ratio", "percent", at, ("target", room)), cls="r"),
            tag("td", tag("code", found["formula"]), cls="formula"),
        )

    return table(
        ("", "component", "r bytes", "r of available", "formula"),
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
        [" of the compiler's figure, ", figures.shown("bytes", "outcome", "device_bytes")],
        [" (compiled in ", figures.shown("seconds", "outcome", "seconds"), ")."],
    )
