"""Headline of the page: the verdict (does it fit) and the main figures."""

from jaxspeed.planner.page.bars import Bar, BarPart, stacked
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, tag

# {verdict of the estimate: (CSS class, sign, text)}.
VERDICTS = {
    "fits": ("good", "✓", "Expected to fit"),
    "tight": ("tight", "!", "Tight"),
    "does not fit": ("bad", "✕", "Not expected to fit"),
}


def title_of(figures: Figures) -> str:
    """Title of the document: the model and its target."""
    model = figures.get("model", "name") or "custom model"
    where = figures.get("target", "name")
    if where is None:
        where = f"{figures.get('devices', 'count')} x {figures.get('devices', 'kind')}"
    return f"{model} on {where}"


def headline(figures: Figures) -> Markup:
    return tag(
        "header",
        tag("h1", title_of(figures)),
        tag("p", _what(figures), cls="lead"),
        _verdict(figures),
        _numbers(figures),
        cls="headline",
    )


def _what(figures: Figures) -> Children:
    axes = [axis for axis, size in figures.get("mesh").items() if size > 1]
    mesh = [[f"{axis} ", figures.shown("count", "mesh", axis)] for axis in axes]
    words: list[Children] = [
        [figures.shown("count", "model", "parameters"), " parameters in "],
        [figures.get("model", "dtype"), " on "],
        [figures.shown("count", "devices", "count"), " ", figures.get("devices", "kind")],
    ]
    listed: list[Children] = [words]
    listed += [[" · ", each] for each in mesh]
    listed.append([" · ZeRO ", figures.shown("count", "stage")])
    listed.append([" · batch of ", figures.shown("count", "batch", "train"), " samples"])
    if (figures.get("batch", "accumulation") or 1) > 1:
        listed.append([" in ", figures.shown("count", "batch", "accumulation"), " micro-batches"])
    return listed


def _verdict(figures: Figures) -> Markup | None:
    """Whether the step fits in memory: by the compiler if it ran, otherwise estimated."""
    if figures.get("target") is None:
        return None
    compiled = figures.get("outcome") is not None
    if compiled:
        found = figures.get("outcome", "fits")
        style, sign, words = ("good", "✓", "Fits") if found else ("bad", "✕", "Does not fit")
        place: tuple[str, ...] = ("outcome", "device_bytes")
        source = "by the compiler"
    elif figures.get("memory") is not None:
        style, sign, words = VERDICTS[figures.get("memory", "verdict")]
        place, source = ("memory", "device"), "estimated"
    else:
        return None
    if (
        compiled
        and style == "bad"
        and figures.get("outcome", "host_bytes") > figures.get("target", "host_memory")
    ):
        return _no_host(figures)
    of = [" of ", figures.shown("bytes", "target", "memory"), " per device"]
    needed = figures.get(*place)
    text: Children = "more than the device's memory"
    bar = None
    if needed is not None:
        share = figures.derived("ratio", "percent", place, ("target", "memory"))
        text = [tag("strong", figures.shown("bytes", *place)), of, ", ", share, f", {source}"]
        size, room = needed, figures.get("target", "memory")
        part = BarPart("needed", size, f"single {style}", "per device")
        bar = stacked([Bar(None, [part], room, "available")], "memory per device")
    return tag(
        "div",
        tag("p", tag("span", sign, cls="sign", aria_hidden="true"), words, cls="words"),
        tag("p", text, cls="m"),
        bar,
        cls=f"verdict {style}",
    )


def _no_host(figures: Figures) -> Markup:
    """The verdict where host memory is insufficient."""
    needed = tag("strong", figures.shown("bytes", "outcome", "host_bytes"))
    has = figures.shown("bytes", "target", "host_memory")
    size, room = figures.get("outcome", "host_bytes"), figures.get("target", "host_memory")
    part = BarPart("host memory", size, "single bad", "per device")
    return tag(
        "div",
        tag(
            "p",
            tag("span", "✕", cls="sign", aria_hidden="true"),
            "Does not fit in host memory",
            cls="words",
        ),
        tag("p", needed, " of host memory per device, of ", has, cls="m"),
        stacked([Bar(None, [part], room, "available")], "host memory"),
        cls="verdict bad",
    )


def _numbers(figures: Figures) -> Markup | None:
    if figures.get("time") is None:
        return None
    unit = figures.get("time", "unit") or "tokens"
    entries: list[tuple[Children, Markup]] = [
        ("step", figures.shown("seconds", "time", "step")),
        (f"{unit} per second", figures.shown("count", "time", "tokens_per_second")),
        ("MFU", figures.shown("percent", "time", "mfu")),
        (f"{unit} per step", figures.shown("count", "time", "tokens")),
    ]
    if figures.get("time", "run", "device_hours"):
        run = ("time", "run")
        tokens = figures.shown("count", *run, "tokens")
        name = tag("span", "device-hours for ", tokens, f" {unit}")
        entries.append((name, figures.shown("count", *run, "device_hours")))
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value)) for name, value in entries],
        cls="numbers",
    )
