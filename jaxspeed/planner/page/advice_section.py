"""Page section: config changes that make the plan fit."""

from typing import Any

from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, section, tag

TITLES = {"single": "The single change that frees most", "cheapest": "The cheapest set that fits"}


def advice(figures: Figures) -> Markup | None:
    found = [(name, figures.get("advice", name)) for name in TITLES]
    cards = [_card(figures, name, each) for name, each in found if each]
    if not cards:
        return None
    return section("advice", "What would help", None, tag("div", cards, cls="cards"))


def _card(figures: Figures, name: str, found: dict[str, Any]) -> Markup:
    at = ("advice", name)
    numbers: list[Children] = [
        ["needs ", figures.shown("bytes", *at, "device_bytes"), " per device"]
    ]
    if found.get("frees") is not None:
        numbers.append(["frees ", figures.shown("bytes", *at, "frees")])
    if found.get("seconds") is not None:
        numbers.append([figures.shown("seconds", *at, "seconds"), " per step"])
    if (found.get("slower") or 0) > 0:
        numbers.append([figures.shown("seconds", *at, "slower"), " slower"])
    return tag(
        "div",
        tag("h3", TITLES[name]),
        tag(
            "ul",
            [tag("li", tag("code", setting(key, value))) for key, value in found["set"].items()],
        ),
        tag("p", [tag("span", each) for each in numbers], cls="chips"),
        cls="card",
    )


def setting(key: str, value: Any) -> str:
    """A config key and its value, in the form of `--set`."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{key}={text}"
