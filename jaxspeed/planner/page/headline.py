"""The answer before anything else: does it fit, and how fast is it."""

from jaxspeed.planner.page.bars import Bar, Part, stacked
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, tag

# From the words of the estimate to (look, sign, words).
SAID = {
    "fits": ("good", "✓", "Expected to fit"),
    "tight": ("tight", "!", "Tight"),
    "does not fit": ("bad", "✕", "Not expected to fit"),
}


def title_of(figures: Figures) -> str:
    """Of the document: the model and where it would run."""
    model = figures.get("model", "name") or "own model"
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
    """M against N, by the compiler where it was asked."""
    if figures.get("target") is None:
        return None
    compiled = figures.get("outcome") is not None
    if compiled:
        found = figures.get("outcome", "fits")
        look, sign, words = ("good", "✓", "Fits") if found else ("bad", "✕", "Does not fit")
        place: tuple[str, ...] = ("outcome", "device_bytes")
        source = "by the compiler"
    elif figures.get("memory") is not None:
        look, sign, words = SAID[figures.get("memory", "verdict")]
        place, source = ("memory", "device"), "estimated"
    else:
        return None
    if (
        compiled
        and look == "bad"
        and figures.get("outcome", "host_bytes") > figures.get("target", "host_memory")
    ):
        return _no_host(figures)
    of = [" of ", figures.shown("bytes", "target", "memory"), " a device"]
    needed = figures.get(*place)
    said: Children = "more than a device has"
    bar = None
    if needed is not None:
        share = figures.derived("ratio", "percent", place, ("target", "memory"))
        said = [tag("strong", figures.shown("bytes", *place)), of, ", ", share, f", {source}"]
        size, room = needed, figures.get("target", "memory")
        part = Part("M", size, f"whole {look}", "what a device needs")
        bar = stacked([Bar(None, [part], room, "N")], "M against N")
    return tag(
        "div",
        tag("p", tag("span", sign, cls="sign", aria_hidden="true"), words, cls="words"),
        tag("p", said, cls="m"),
        bar,
        cls=f"verdict {look}",
    )


def _no_host(figures: Figures) -> Markup:
    """What lacks is memory of the host, not of the device."""
    needed = tag("strong", figures.shown("bytes", "outcome", "host_bytes"))
    has = figures.shown("bytes", "target", "host_memory")
    size, room = figures.get("outcome", "host_bytes"), figures.get("target", "host_memory")
    part = Part("host memory", size, "whole bad", "what a device needs of its host")
    return tag(
        "div",
        tag(
            "p",
            tag("span", "✕", cls="sign", aria_hidden="true"),
            "Does not fit its host",
            cls="words",
        ),
        tag("p", needed, " of host memory for a device, and there are ", has, cls="m"),
        stacked([Bar(None, [part], room, "of the host")], "host memory"),
        cls="verdict bad",
    )


def _numbers(figures: Figures) -> Markup | None:
    if figures.get("time") is None:
        return None
    unit = figures.get("time", "unit") or "tokens"
    entries: list[tuple[Children, Markup]] = [
        ("step", figures.shown("seconds", "time", "step")),
        (f"{unit} a second", figures.shown("count", "time", "tokens_per_second")),
        ("MFU", figures.shown("percent", "time", "mfu")),
        (f"{unit} a step", figures.shown("count", "time", "tokens")),
    ]
    if figures.get("time", "run", "device_hours"):
        run = ("time", "run")
        tokens = figures.shown("count", *run, "tokens")
        name = tag("span", "device-hours of ", tokens, f" {unit}")
        entries.append((name, figures.shown("count", *run, "device_hours")))
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value)) for name, value in entries],
        cls="numbers",
    )
