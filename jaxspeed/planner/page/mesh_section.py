"""Page section: the mesh, its devices with their links, and the links of each axis."""

from collections.abc import Iterator, Mapping

from jaxspeed.planner.page import styles
from jaxspeed.planner.page.figures import Figures
from jaxspeed.planner.page.markup import Children, Markup, section, table, tag
from jaxspeed.planner.page.torus_section import torus

# {axis: its use, for any ZeRO stage}.
PURPOSE = {
    "pipe": "splits the layers into pipeline stages",
    "replica": "shards the batch; replicates state",
    "data": "shards the batch; ZeRO shards state",
    "seq": "shards the sequence",
    "expert": "shards the experts",
    "tensor": "shards each layer's matmuls",
}
SPEED = {"slice": "outside", "network": "outside"}
MOST_NODES = 6  # beyond that only the first and the last are drawn
MOST_DEVICES = 16  # of a node, likewise


def mesh(figures: Figures) -> Markup | None:
    target = figures.get("target")
    if target is None or target.get("layout") is None:
        return None
    drawn = torus(figures) if target["topology"] else nodes(figures)
    return section("mesh", "Mesh", _lead(figures), tag("div", drawn, _axes(figures), cls="beside"))


def _lead(figures: Figures) -> Children:
    axes = [axis for axis, size in figures.get("mesh").items() if size > 1]
    counted = [[figures.shown("count", "mesh", axis), f" {axis}"] for axis in axes]
    product = [part for each in counted for part in (" × ", each)][1:]
    items = [figures.shown("count", "devices", "count"), " devices"]
    return [*items, *([" = ", product] if product else []), "."]


def _axes(figures: Figures) -> Markup | None:
    layout: Mapping[str, Mapping[str, int]] = figures.get("target", "layout")
    if not layout:
        return None

    def row(axis: str) -> Markup:
        return tag(
            "tr",
            tag("th", tag("i", cls=f"dot {styles.AXES[axis]}"), axis, scope="row"),
            tag("td", figures.shown("count", "mesh", axis), cls="r"),
            tag("td", _links(figures, axis)),
            tag("td", PURPOSE[axis], cls="purpose"),
        )

    heads = ("axis", "r size", "links", "use")
    return table(heads, [row(axis) for axis in layout], "axes")


def _links(figures: Figures, axis: str) -> Children:
    """The links of an axis, with the bandwidth of one in one direction."""
    items: list[Children] = []
    for link in figures.get("target", "layout", axis):
        speed = SPEED.get(link, "link")
        name = link_name(figures, link)
        count = figures.shown("count", "target", "layout", axis, link)
        rate: Children = [", ", figures.shown("bytes a second", "target", speed)]
        if link == "core":
            rate = None
        items.append(tag("div", count, f" {name}", rate))
    return items


def link_name(figures: Figures, link: str) -> str:
    """Display name of a kind of link."""
    topology = figures.get("target", "topology")
    if link in "xyz":
        ring = figures.get("target", "wraps")["xyz".index(link)]
        return f"along {link}{' (ring)' if ring and topology['xyz'.index(link)] > 2 else ''}"
    return {
        "core": "cores of a chip",
        "slice": "slices, over the network",
        "node": "inside a node",
        "network": "nodes, over the network",
    }[link]


# -- nodes with switches: fast links inside, the network between them ------------------------------


def nodes(figures: Figures) -> Markup:
    target = figures.get("target")
    node, count = target["node"], target["count"]
    many = count // node
    shown = list(_some(many, MOST_NODES))
    boxes = [_node(figures, n, node) if n is not None else _gap(many) for n in shown]
    network = _bar(figures, "network", "network", "outside") if many > 1 else None
    return tag("figure", tag("div", boxes, cls="nodes"), network, cls="switched")


def _some(count: int, most: int) -> Iterator[int | None]:
    """All numbers, or the first ones and the last with None between them."""
    if count <= most:
        yield from range(count)
        return
    yield from range(most - 2)
    yield None
    yield count - 1


def _gap(many: int) -> Markup:
    return tag("span", f"⋯ {many} nodes in total ⋯", cls="more")


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
    """A switch, with the axes that communicate over it and the bandwidth of a device."""
    layout: Mapping[str, Mapping[str, int]] = figures.get("target", "layout")
    axes = [axis for axis, links in layout.items() if link in links]
    items: list[Children] = [
        [
            " ",
            tag("i", cls=f"dot {styles.AXES[axis]}"),
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
        items,
        cls=f"switch {styles.AXES[axes[0]] if axes else 'a0'}",
    )
