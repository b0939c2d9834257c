"""Links of a target that a collective uses (torus, node, network), and its time on them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspeed.communication import Communication, ring_passes, ring_share
from jaxspeed.hardware.targets import Target
from jaxspeed.planner.time.torus import extents, groups_of, placed_on

LINKS, NETWORK, HOST = "links", "network", "host"


@dataclass(frozen=True)
class Route:
    """Topology of a group of devices.

    Attributes:
      inside: number of devices in the same slice or node.
      across: number of slices or nodes.
      parallel_links: links per device that a ring uses at once, a part of one where groups share
        it; 0 where `inside` is 1.
      hops: diameter of the group inside of a slice or node.
      sharing: groups whose messages pass the same link.
    """

    inside: int
    across: int
    parallel_links: float
    hops: int
    sharing: int = 1


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

    def link(self, communication: Communication) -> str:
        """The kind of link that bounds it."""
        if not communication.axes:
            return HOST
        return NETWORK if self.route(communication.axes).across > 1 else LINKS

    def seconds(self, communication: Communication, latency: bool = True) -> float:
        """Seconds of one run; without `latency` if it is combined with another."""
        chip = self.target.chip
        if not communication.axes:
            return communication.bytes / (chip.host_link * chip.reached["host"])
        route = self.route(communication.axes)
        if communication.kind == "collective-permute":
            return self._message(communication, route)
        within = self._within(communication, route, latency)
        if route.across == 1:
            return within
        across = self._across(communication, route, latency)
        # NCCL's rings go through nodes and network at once; slices of TPUs do one after the other.
        return max(within, across) if chip.platform == "cuda" else within + across

    def _within(self, communication: Communication, route: Route, latency: bool) -> float:
        chip = self.target.chip
        if route.inside == 1:
            return 0.0
        rate = chip.link * chip.reached["links"] * route.parallel_links
        turns = ring_passes(communication.kind) * latency
        bytes_ = ring_share(communication.bytes, communication.kind, route.inside)
        if communication.kind == "all-to-all" and chip.torus_dims:
            # Half of a ring's bytes cross its middle, over all hops on the way; other groups, which
            # share its links, do not make more of them.
            bytes_ *= max(route.hops / route.sharing, 1) / 2
        return bytes_ / rate + turns * self._latency(route)

    def _latency(self, route: Route) -> float:
        """Latency around the group: per hop on a torus, once through a switch."""
        chip = self.target.chip
        return chip.hop["links"] * (route.hops if chip.torus_dims else 1)

    def _across(self, communication: Communication, route: Route, latency: bool) -> float:
        """Time between slices or nodes, where each device sends its share of its slice's bytes."""
        chip = self.target.chip
        turns = ring_passes(communication.kind) * latency
        steps = math.ceil(math.log2(route.across))
        bytes_ = ring_share(communication.bytes, communication.kind, route.across) / route.inside
        rate = chip.outside * chip.reached["outside"]
        return bytes_ / rate + turns * steps * chip.hop["outside"]

    def _message(self, communication: Communication, route: Route) -> float:
        chip = self.target.chip
        if route.across > 1:
            return (
                communication.bytes / (chip.outside * chip.reached["outside"]) + chip.hop["outside"]
            )
        # A neighbour is as many links away as groups are interleaved.
        rate = chip.link * chip.reached["links"] / route.sharing
        return communication.bytes / rate + route.sharing * chip.hop["links"]

    def _find(self, axes: tuple[str, ...]) -> Route:
        """The route of a group: the sum of those along the dims of a torus."""
        groups = groups_of(self._placed, axes)
        across, *dims = extents(groups[0])
        inside = math.prod(self.sizes[axis] for axis in axes) // across
        if inside == 1:
            return Route(1, across, 0, 0)
        if not dims:
            return Route(inside, across, 1, inside - 1)
        links, hops, sharing = 0.0, 0, 1
        for dim, (size, wraps) in enumerate(zip(self.target.topology, self.target.wraps), 1):
            if dims[dim - 1] > 1:
                route = _along(groups[..., dim], size, wraps)
                links, hops = links + route[0], hops + route[1]
                sharing = max(sharing, route[2])
        return Route(inside, across, links or 1, max(hops, 1), sharing)


def _along(positions: Any, size: int, wraps: bool) -> tuple[float, int, int]:
    """(links a ring uses at once, its diameter, groups that share a link) of groups along a dim.

    All groups communicate at the same time, so a link's bandwidth is divided by the groups that
    pass it. A group has two routes:

    - around the dim, if it wraps around: a ring, in both directions. Every group passes each link,
      so of g groups on one line of the dim each has 2 / g links; both, if it takes the entire dim.
    - between its ends: a line, of which a ring's pass uses both directions as one link. Blocks of
      neighbours have links of their own; groups with stride s, of a dim that is split between axes,
      pass those of the s - 1 that are interleaved with them, so that each has 1 / s.

    A ring of 8 chips, split into 4 x 2: the inner axis has one link, the outer one 2 / 2, over
    twice the hops. A line of 8: one, and 1 / 2.

    Args:
      positions: [groups, members] along the dim.
    """
    lines = np.unique(np.sort(positions, axis=1), axis=0)
    first, last = lines[:, :1], lines[:, -1:]
    link = np.arange(size - 1)
    passing = int(((first <= link) & (link < last)).sum(axis=0).max())
    around = 2 / len(lines) if wraps and size > 2 else 0.0
    if around > 1 / passing:
        return around, size // 2, len(lines)
    return 1 / passing, int((last - first).max()), passing
