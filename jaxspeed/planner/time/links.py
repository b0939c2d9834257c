"""Links of a target that a collective uses (torus, node, network), and its time on them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxspeed.communication import Communication, ring_passes, ring_share
from jaxspeed.hardware.targets import Target
from jaxspeed.planner.time.torus import extents, placed_on

LINKS, NETWORK, HOST = "links", "network", "host"


@dataclass(frozen=True)
class Route:
    """Topology of a group of devices.

    Attributes:
      inside: number of devices in the same slice or node.
      across: number of slices or nodes.
      parallel_links: links per device that a ring uses at once; 0 where `inside` is 1.
      hops: diameter of the group inside of a slice or node.
    """

    inside: int
    across: int
    parallel_links: float
    hops: int


class Links:
    """The links of a target under a mesh.

    Args:
      sizes: sizes of all mesh axes.
    """

    def __init__(self, target: Target, sizes: Mapping[str, int]) -> None:
        self.target, self.sizes = target, dict(sizes)
        self._placed = placed_on(target, sizes)
        self._routes: dict[tuple[str, ...], Route] = {}

    def route(self, axes: Sequence[str]) -> Route:
        key = tuple(axes)
        if key not in self._routes:
            self._routes[key] = self._find(key)
        return self._routes[key]

    def link(self, one: Communication) -> str:
        """The kind of link that bounds it."""
        if not one.axes:
            return HOST
        return NETWORK if self.route(one.axes).across > 1 else LINKS

    def seconds(self, one: Communication, latency: bool = True) -> float:
        """Seconds of one run; without `latency` if it is combined with another."""
        chip = self.target.chip
        if not one.axes:
            return one.bytes / (chip.host_link * chip.reached["host"])
        route = self.route(one.axes)
        if one.kind == "collective-permute":
            return self._message(one, route)
        within = self._within(one, route, latency)
        if route.across == 1:
            return within
        across = self._across(one, route, latency)
        # NCCL's rings go through nodes and network at once; slices of TPUs do one after the other.
        return max(within, across) if chip.platform == "cuda" else within + across

    def _within(self, one: Communication, route: Route, latency: bool) -> float:
        chip = self.target.chip
        if route.inside == 1:
            return 0.0
        rate = chip.link * chip.reached["links"] * route.parallel_links
        turns = ring_passes(one.kind) * latency
        bytes_ = ring_share(one.bytes, one.kind, route.inside)
        if one.kind == "all-to-all" and chip.torus_dims:
            # Half of a ring's bytes cross its middle, over all hops on the way.
            bytes_ *= max(route.hops, 1) / 2
        return bytes_ / rate + turns * self._latency(route)

    def _latency(self, route: Route) -> float:
        """Latency around the group: per hop on a torus, once through a switch."""
        chip = self.target.chip
        return chip.hop["links"] * (route.hops if chip.torus_dims else 1)

    def _across(self, one: Communication, route: Route, latency: bool) -> float:
        """Time between slices or nodes, where each device sends its share of its slice's bytes."""
        chip = self.target.chip
        turns = ring_passes(one.kind) * latency
        steps = math.ceil(math.log2(route.across))
        bytes_ = ring_share(one.bytes, one.kind, route.across) / route.inside
        rate = chip.outside * chip.reached["outside"]
        return bytes_ / rate + turns * steps * chip.hop["outside"]

    def _message(self, one: Communication, route: Route) -> float:
        chip = self.target.chip
        if route.across > 1:
            return one.bytes / (chip.outside * chip.reached["outside"]) + chip.hop["outside"]
        return one.bytes / (chip.link * chip.reached["links"]) + chip.hop["links"]

    def _find(self, axes: tuple[str, ...]) -> Route:
        """The route of a group; per dim of a torus a ring, or a line where it does not wrap around.

        A ring is bidirectional; a part of a dim has no wrap-around link.
        """
        across, *dims = extents(self._placed, axes)
        inside = math.prod(self.sizes[axis] for axis in axes) // across
        if inside == 1:
            return Route(1, across, 0, 0)
        if not dims:
            return Route(inside, across, 1, inside - 1)
        links = hops = 0
        for extent, size, wraps in zip(dims, self.target.topology, self.target.wraps):
            closed = extent == size and wraps and size > 2
            links += (2 if closed else 1) if extent > 1 else 0
            hops += extent // 2 if closed else extent - 1
        return Route(inside, across, max(links, 1), max(hops, 1))
