"""Assignment of parameters to servers by bytes, as full arrays or runs of rows.

A parameter may be partitioned where its update treats every element alike, along its largest dim.
Each server has at most one run of rows of each parameter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OwnedRows:
    """A run of rows along one dim of a parameter."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int
    start: int
    stop: int

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> "OwnedRows":
        return cls(shape, 0, 0, shape[0] if shape else 1)

    @property
    def is_full(self) -> bool:
        return not self.shape or self.stop - self.start == self.shape[self.dim]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def of(self, x: Any) -> Any:
        """This slice of the full array."""
        if self.is_full:
            return x
        return x[(slice(None),) * self.dim + (slice(self.start, self.stop),)]


OwnedParams = Mapping[str, OwnedRows]  # what one server owns, by path


@dataclass(frozen=True)
class AssignableParam:
    """A parameter, with what its assignment depends on."""

    path: str
    shape: tuple[int, ...]
    nbytes: int  # of all of its arrays on its owner
    divisible: bool


def assign_params(
    parameters: Sequence[AssignableParam], servers: int
) -> list[dict[str, OwnedRows]]:
    """What each server owns, in the order of the parameters.

    Indivisible parameters go, the largest first, to the server with the fewest bytes. The others
    fill up one server after the other to an equal share of the bytes, partitioned where a share is
    full.
    """
    load = [0.0] * servers
    owned: list[dict[str, OwnedRows]] = [{} for _ in range(servers)]
    stay = [p for p in parameters if not p.divisible or math.prod(p.shape) < 2]
    for one in sorted(stay, key=lambda p: -p.nbytes):
        least = load.index(min(load))
        owned[least][one.path] = OwnedRows.full(one.shape)
        load[least] += one.nbytes
    fill = _Fill(load, sum(load) + sum(p.nbytes for p in parameters if p not in stay))
    for one in parameters:
        if one not in stay:
            for server, run in fill.add(one):
                owned[server][one.path] = run
    order = {one.path: i for i, one in enumerate(parameters)}
    return [dict(sorted(own.items(), key=lambda item: order[item[0]])) for own in owned]


class _Fill:
    """Servers that are filled up one after the other."""

    def __init__(self, load: Sequence[float], total: float) -> None:
        self._room = [max(total / len(load) - had, 0.0) for had in load]
        self._server = 0

    def add(self, one: AssignableParam) -> list[tuple[int, OwnedRows]]:
        """The owners of a parameter, each with its rows."""
        dim = one.shape.index(max(one.shape))
        rows, found, start = one.shape[dim], [], 0
        a_row = one.nbytes / rows
        while start < rows:
            last = self._server == len(self._room) - 1
            fits = max(round(self._room[self._server] / a_row), 0)
            stop = rows if last else min(rows, start + fits)
            if stop > start:
                found.append((self._server, OwnedRows(one.shape, dim, start, stop)))
                self._room[self._server] -= (stop - start) * a_row
            if stop < rows:  # the next server gets what rounding left
                self._room[self._server + 1] += self._room[self._server]
                self._server += 1
            start = stop
        return found
