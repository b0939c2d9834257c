"""Stacked horizontal bars on a common scale."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspeed.planner.page.markup import Children, Markup, join, tag

_LEAST = 0.001  # of the scale: thinner parts are invisible, and only in the table


@dataclass(frozen=True)
class BarPart:
    """A part of a bar, with its CSS class and tooltip; `key` is its number in the table."""

    name: str
    size: float
    style: str
    tip: str
    key: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar: label, parts in order, and the limit to mark (`room`), if any."""

    label: Children
    parts: Sequence[BarPart]
    room: float | None = None
    room_label: Children = None


def stacked(bars: Sequence[Bar], label: str) -> Markup:
    """Draw bars on the scale of the longest bar or limit."""
    scale = max((max(sum(p.size for p in bar.parts), bar.room or 0.0) for bar in bars), default=0.0)
    return tag("div", [_bar(bar, scale or 1.0) for bar in bars], cls="bars", aria_label=label)


def _bar(bar: Bar, scale: float) -> Markup:
    parts, at = [], 0.0
    for part in bar.parts:
        if part.size / scale >= _LEAST:
            parts.append(_part(part, at / scale, part.size / scale))
        at += part.size
    room = bar.room
    marks: list[Markup] = []
    if room is not None:
        marks.append(tag("span", cls="room", style=f"width:{room / scale:.4%}"))
        if at > room:
            left, over = room / scale, (at - room) / scale
            marks.append(tag("span", cls="over", style=f"left:{left:.4%};width:{over:.4%}"))
        marks.append(tag("span", cls="mark", style=f"left:{room / scale:.4%}"))
        style = f"right:{1 - room / scale:.4%}"
        marks.append(tag("span", bar.room_label, cls="limit", style=style))
    track = tag("div", parts, marks, cls="track" if room is None else "track limited")
    return join(tag("div", bar.label, cls="bar-label"), track)


def _part(part: BarPart, at: float, share: float) -> Markup:
    inside = join(
        tag("b", part.key, cls="key") if part.key else None, tag("span", part.name, cls="name")
    )
    return tag(
        "span",
        tag("span", inside, cls="in"),
        cls=f"part {part.style}",
        style=f"left:{at:.4%};width:{share:.4%}",
        tabindex=0,
        role="img",
        aria_label=f"{part.name}: {part.tip}",
        data_tip=f"{part.name}\n{part.tip}",
    )
