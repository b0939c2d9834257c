"""Drawing of a TPU torus as a lattice, truncated where it is large, with the size of each dim."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxspeed.planner.page import styles
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Markup, tag

MOST = 4  # chips drawn along a dim: beyond that the first three and the last
Place = tuple[int, ...]
# Projected steps along x, y and z, in units of the drawing.
SOLID = ((50.0, 15.0), (34.0, -23.0), (0.0, -52.0))
FLAT = ((58.0, 0.0), (0.0, -52.0))


class Dim(NamedTuple):
    """One drawn dim of the torus."""

    name: str
    size: int
    shown: int
    wraps: bool
    axes: tuple[tuple[str, int], ...]  # mesh axes along it, with their extents
    step: tuple[float, float]

    @property
    def style(self) -> str:
        return styles.AXES[self.axes[0][0]] if self.axes else "a0"

    @property
    def truncated(self) -> bool:
        return self.shown < self.size


def torus(figures: Figures) -> Markup:
    """The lattice of one slice, and the number of slices as text."""
    dims = _dims(figures)
    slices = figures.get("target", "slices")
    note = [
        tag("b", figures.shown("count", "target", "slices")),
        " such slices, connected by the network",
    ]
    drawn = _drawing(dims)
    return tag(
        "figure",
        drawn,
        tag("figcaption", [_caption(figures, i, dim) for i, dim in enumerate(dims)]),
        tag("p", note, cls="slices") if slices > 1 else None,
        cls="torus",
    )


def _dims(figures: Figures) -> list[Dim]:
    target, dims = figures.get("target"), []
    steps = SOLID if len(target["topology"]) == 3 else FLAT
    for i, size in enumerate(target["topology"]):
        name = "xyz"[i]
        along = ((axis, links.get(name)) for axis, links in target["layout"].items())
        axes = tuple((axis, n) for axis, n in along if n)
        wraps = target["wraps"][i] and size > 2
        dims.append(Dim(name, size, min(size, MOST), wraps, axes, steps[i]))
    return dims


def _caption(figures: Figures, number: int, dim: Dim) -> Markup:
    axes = ", ".join(axis for axis, _ in dim.axes) or "no axis"
    ring = "ring" if dim.wraps else "line"
    return tag(
        "span",
        tag("i", cls=f"dot {dim.style}"),
        tag("b", dim.name, " "),
        figures.shown("count", "target", "topology", number),
        f" chips, {ring}: {axes}",
    )


def _drawing(dims: Sequence[Dim]) -> Markup:
    every = list(itertools.product(*(range(dim.shown) for dim in dims)))
    places = [place for place in every if _seen(dims, place)]
    ends = [_at(dims, place) for place in places]
    margin = 46 if any(dim.wraps for dim in dims) else 30
    left, right = min(x for x, _ in ends) - margin, max(x for x, _ in ends) + margin
    top, bottom = min(y for _, y in ends) - margin, max(y for _, y in ends) + margin
    # Back to front: y grows away from the viewer.
    order = sorted(places, key=lambda p: (-p[1], p[0], *p[2:]) if len(dims) == 3 else p)
    parts: list[Markup] = [*_wraps(dims)]
    for place in order:
        parts += _links(dims, place)
    parts += [_chip(*_at(dims, place)) for place in order]
    return tag(
        "svg",
        parts,
        _labels(dims),
        viewBox=f"{left:.0f} {top:.0f} {right - left:.0f} {bottom - top:.0f}",
        style=f"max-width:{right - left:.0f}px",
        role="img",
        aria_label="torus of " + " x ".join(str(dim.size) for dim in dims) + " chips",
    )


def _at(dims: Sequence[Dim], place: Place) -> tuple[float, float]:
    """Projected position, with a gap before the last chip of a truncated dim."""
    x = y = 0.0
    for dim, n in zip(dims, place, strict=True):
        far = n + (0.5 if dim.truncated and n == dim.shown - 1 else 0)
        x, y = x + far * dim.step[0], y + far * dim.step[1]
    return x, y


def _seen(dims: Sequence[Dim], place: Place, *more: Place) -> bool:
    """Whether all these places are on one visible side: front, right or top."""
    if len(dims) < 3 or all(dim.shown <= 2 for dim in dims):
        return True
    sides = (
        lambda p: p[1] == 0,
        lambda p: p[0] == dims[0].shown - 1,
        lambda p: p[2] == dims[2].shown - 1,
    )
    return any(all(side(p) for p in (place, *more)) for side in sides)


def _chip(x: float, y: float) -> Markup:
    size = 15
    return tag(
        "rect",
        x=f"{x - size / 2:.1f}",
        y=f"{y - size / 2:.1f}",
        width=f"{size:.1f}",
        height=f"{size:.1f}",
        rx=3,
        cls="chip",
    )


def _links(dims: Sequence[Dim], place: Place) -> Iterator[Markup]:
    """Links to the next chip in each dim."""
    x, y = _at(dims, place)
    for i, dim in enumerate(dims):
        if place[i] + 1 == dim.shown:
            continue
        gap = dim.truncated and place[i] + 2 == dim.shown
        following = (*place[:i], place[i] + 1, *place[i + 1 :])
        if not _seen(dims, place, following):
            continue
        u, v = _at(dims, following)
        yield tag(
            "line",
            x1=f"{x:.1f}",
            y1=f"{y:.1f}",
            x2=f"{u:.1f}",
            y2=f"{v:.1f}",
            cls=f"link {dim.style}{' gap' if gap else ''}",
        )


def _wraps(dims: Sequence[Dim]) -> Iterator[Markup]:
    """Wrap-around link of each ring dim, along the nearest edge."""
    for i, dim in enumerate(dims):
        if not dim.wraps:
            continue
        first, last = _edge(dims, i)
        (x, y), (u, v) = _at(dims, first), _at(dims, last)
        bend_x, bend_y = _outward(dims, i)
        middle = f"{(x + u) / 2 + bend_x:.1f} {(y + v) / 2 + bend_y:.1f}"
        path = f"M{x:.1f} {y:.1f}Q{middle} {u:.1f} {v:.1f}"
        yield tag("path", d=path, cls=f"link wrap {dim.style}")


def _edge(dims: Sequence[Dim], along: int) -> tuple[Place, Place]:
    """Ends of a dim's labelled outer edge: x at the bottom, y on the right, z on the left."""
    last = [dim.shown - 1 for dim in dims]
    start = [0] * len(dims)
    if along == 1 and len(dims) == 3:
        start[0] = last[0]
    end = list(start)
    end[along] = last[along]
    return tuple(start), tuple(end)


def _outward(dims: Sequence[Dim], along: int) -> tuple[float, float]:
    if len(dims) == 2:
        return ((0, 52), (-58, 0))[along]
    return ((-10, 44), (44, 22), (-54, 0))[along]


def _labels(dims: Sequence[Dim]) -> Iterator[Markup]:
    """The size of each dim at the middle of its edge."""
    for i, dim in enumerate(dims):
        if dim.size < 2:
            continue
        first, last = _edge(dims, i)
        (x, y), (u, v) = _at(dims, first), _at(dims, last)
        bend_x, bend_y = _outward(dims, i)
        scale = 0.66 if dim.wraps else 0.45
        at_x, at_y = (x + u) / 2 + scale * bend_x, (y + v) / 2 + scale * bend_y
        text = f"{dim.name} {dim.size}"
        yield tag("text", text, x=f"{at_x:.1f}", y=f"{at_y + 4:.1f}", cls=f"{dim.style} count")
