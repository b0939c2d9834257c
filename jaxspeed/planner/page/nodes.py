"""Devices behind switches: nodes whose devices share a fast link, and the network between them."""

from collections.abc import Iterator, Mapping

from jaxspeed.planner.page import looks
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, tag

MOST_NODES = 6  # of more the first and the last are drawn
MOST_DEVICES = 16  # of a node, likewise


def nodes(figures: Figures) -> Markup:
    target = figures.get("target")
    node, count = target["node"], target["count"]
    many = count // node
    shown = list(_some(many, MOST_NODES))
    boxes = [_node(figures, n, node) if n is not None else _gap(many) for n in shown]
    network = _bar(figures, "network", "network", "outside") if many > 1 else None
    return tag("figure", tag("div", boxes, cls="nodes"), network, cls="switched")


def _some(count: int, most: int) -> Iterator[int | None]:
    """All numbers, or the first and the last with None between them."""
    if count <= most:
        yield from range(count)
        return
    yield from range(most - 2)
    yield None
    yield count - 1


def _gap(many: int) -> Markup:
    return tag("span", f"⋯ {many} nodes in all ⋯", cls="more")


def _node(figures: Figures, number: int, size: int) -> Markup:
    several = figures.get("target", "count") > size
    squares = [
        tag("span", cls="device") if n is not None else tag("span", f"⋯ {size}", cls="more")
        for n in _some(size, MOST_DEVICES)
    ]
    return tag(
        "div",
        tag("span", f"node {number}", cls="node-name") if several else None,
        tag("div", squares, cls="devices"),
        _bar(figures, "node", _inside(figures), "link") if size > 1 else None,
        cls="node",
    )


def _inside(figures: Figures) -> str:
    return {"cuda": "NVLink", "cpu": "memory"}.get(figures.get("devices", "platform"), "links")


def _bar(figures: Figures, link: str, name: str, speed: str) -> Markup:
    """A switch, with the axes whose exchanges go over it and one device's speed."""
    layout: Mapping[str, Mapping[str, int]] = figures.get("target", "layout")
    axes = [axis for axis, links in layout.items() if link in links]
    said: list[Children] = [
        [
            " ",
            tag("i", cls=f"dot {looks.AXES[axis]}"),
            f"{axis} ",
            figures.shown("count", "target", "layout", axis, link),
        ]
        for axis in axes
    ]
    return tag(
        "div",
        tag("b", name),
        " ",
        figures.shown("bytes a second", "target", speed),
        said,
        cls=f"switch {looks.AXES[axes[0]] if axes else 'a0'}",
    )
