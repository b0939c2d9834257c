"""Partition of parameters over servers: in even shards (a mesh), or by bytes (processes).

A parameter is partitioned along one dim into pieces, at most one per server. A worker splits its
gradients and joins pulled parameters by it, so that a server only receives what it owns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspeed.axes import DATA
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.specs import sharded_dim
from jaxspeed.placement.table import PlacementTable


class Piece(NamedTuple):
    """A run of rows, and the server that owns it."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class ParamSplit:
    """The pieces of one parameter."""

    shape: tuple[int, ...]  # as layers read it
    stored: tuple[int, ...]  # padded, so that the pieces of a mesh are equal
    dim: int | None  # None: undivided, on every server of a mesh or on one process
    pieces: tuple[Piece, ...]

    def shape_of(self, piece: Piece) -> tuple[int, ...]:
        if self.dim is None:
            return self.stored
        before, after = self.stored[: self.dim], self.stored[self.dim + 1 :]
        return (*before, piece.stop - piece.start, *after)

    def take(self, x: Any, piece: Piece) -> Any:
        """A piece of a stored array, on devices or on the host."""
        if self.dim is None:
            return x
        return x[(slice(None),) * self.dim + (slice(piece.start, piece.stop),)]

    def split(self, x: Any) -> list[Any]:
        x = x if self.dim is None else pad(x, self.stored)
        return [self.take(x, piece) for piece in self.pieces]

    def join(self, pieces: Sequence[Any]) -> Any:
        """The parameter as layers read it; one array is joined already."""
        if len(pieces) == 1:
            return unpad(pieces[0], self.shape)
        on_host = isinstance(pieces[0], np.ndarray)
        joined = (np if on_host else jnp).concatenate(pieces, self.dim)
        return unpad(joined, self.shape)


Splits = Mapping[str, ParamSplit]  # by path


def owned_by(splits: Splits, server: int) -> dict[str, Piece]:
    """The pieces of one server, by path."""
    return {
        path: piece
        for path, split in splits.items()
        for piece in split.pieces
        if piece.server == server
    }


def join_all(splits: Splits, by_server: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Parameters by path from the pieces of all servers; those that no server has are left out."""
    pieces = {path: [by_server[p.server].get(path) for p in s.pieces] for path, s in splits.items()}
    return {path: splits[path].join(x) for path, x in pieces.items() if x[0] is not None}


def split_evenly(table: PlacementTable) -> dict[str, ParamSplit]:
    """The pieces of what layers read, as the table of the servers' mesh shards it."""
    return {
        row.path: _even(
            row.leaf.shape,
            row.shape(row.source),
            sharded_dim(row.source.spec, DATA),
            table.mesh.size,
        )
        for row in table
    }


def _even(
    shape: tuple[int, ...], stored: tuple[int, ...], dim: int | None, servers: int
) -> ParamSplit:
    if dim is None:
        return ParamSplit(shape, stored, None, (Piece(0, 0, 0),))
    rows = stored[dim] // servers
    pieces = tuple(Piece(s, s * rows, (s + 1) * rows) for s in range(servers))
    return ParamSplit(shape, stored, dim, pieces)


@dataclass(frozen=True)
class AssignableParam:
    """A parameter, with what its assignment depends on."""

    path: str
    shape: tuple[int, ...]
    nbytes: int  # of all of its arrays on its owner
    divisible: bool  # whether its update treats every element alike


def split_by_bytes(parameters: Sequence[AssignableParam], servers: int) -> dict[str, ParamSplit]:
    """The pieces of each parameter, for servers with equal bytes.

    Indivisible parameters go, the largest first, to the server with the fewest bytes. The others
    fill up one server after the other to an equal share of the bytes, partitioned along their
    largest dim where a share is full.
    """
    load = [0.0] * servers
    found: dict[str, ParamSplit] = {}
    undivided = [p for p in parameters if not p.divisible or math.prod(p.shape) < 2]
    for one in sorted(undivided, key=lambda p: -p.nbytes):
        least = load.index(min(load))
        found[one.path] = ParamSplit(one.shape, one.shape, None, (Piece(least, 0, 0),))
        load[least] += one.nbytes
    rest = [one for one in parameters if one.path not in found]
    total = sum(load) + sum(one.nbytes for one in rest)
    room = [max(total / servers - had, 0.0) for had in load]
    server = 0
    for one in rest:
        dim = one.shape.index(max(one.shape))
        rows, pieces, start = one.shape[dim], [], 0
        row_bytes = one.nbytes / rows
        while start < rows:
            fits = max(round(room[server] / row_bytes), 0)
            stop = rows if server == servers - 1 else min(rows, start + fits)
            if stop > start:
                pieces.append(Piece(server, start, stop))
                room[server] -= (stop - start) * row_bytes
            if stop < rows:  # the next server gets what rounding left
                room[server + 1] += room[server]
                server += 1
            start = stop
        found[one.path] = ParamSplit(one.shape, one.shape, dim, tuple(pieces))
    return {one.path: found[one.path] for one in parameters}
