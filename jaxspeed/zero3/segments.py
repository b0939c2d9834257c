"""Segments of a traced program: the equations of one unit, of several, or between units.

Calls and loops that hold units are pieces of their own, into which the slicing goes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.jaxpr.primitives import CHECKPOINTS, INLINED
from jaxspeed.jaxpr.traverse import consts_and_carry, is_var, sliceable_bodies
from jaxspeed.zero3.find_units import Units
from jaxspeed.zero3.param_views import VIEWS
from jaxspeed.zero3.residual_policy import ResidualPolicy
from jaxspeed.zero3.sharded_param import ShardedParam
from jaxspeed.zero3.table_lookup import looks_up

Storage = Mapping[Any, ShardedParam]


@dataclass(frozen=True)
class Way:
    """How pieces are run."""

    units: Units
    samples: int | None = None  # of the batch; None: no lookups by columns
    # In a user's own jax.checkpoint the recomputation gathers again by itself, and keeps nothing.
    recomputed: bool = False
    keeping: ResidualPolicy | None = None  # None: units keep whatever their derivative needs
    # Variables of this program that depend on the batch and are not the same in each trip of a
    # loop: what is made of them may wait elsewhere.
    activations: frozenset[Any] = frozenset()
    in_loop: bool = False

    @property
    def every(self) -> int:
        """How many units are made again together."""
        return self.keeping.every if self.keeping else 1

    def inside(self, inner: Mapping[Any, Any], moving: set[Any], **changes: Any) -> "Way":
        """The way through a program that an equation runs; `inner` maps its inputs to ours."""
        found = frozenset(iv for iv, v in inner.items() if is_var(v) and v in moving)
        return replace(self, activations=found, **changes)


@dataclass(frozen=True)
class Segment:
    """Equations that belong together."""

    eqns: list[Any]
    units: int  # how many of them: more than one are made again together
    nested: bool  # a single equation that holds units, or looks up rows of a table
    outputs: Sequence[Any] = ()  # what it hands on


def pieces(jaxpr: Any, way: Way, storage: Storage) -> list[Segment]:
    """Maximal runs of equations of one unit (or of none), and what each must hand on."""

    views = _possible_views(jaxpr, storage)

    def key(pair: tuple[int, Any]) -> Any:
        index, eqn = pair
        if _holds_lookup(eqn, storage, way):
            return ("nested", index)
        serial = way.units.of(eqn)
        if serial is not None:
            return serial
        nested = _holds_unit(eqn, way.units) or _scans_over(eqn, views)
        return ("nested", index) if nested else None

    def run(k: Any, eqns: list[Any]) -> Segment:
        nested = isinstance(k, tuple)
        return Segment(eqns, 0 if nested or k is None else 1, nested)

    pairs = itertools.groupby(enumerate(jaxpr.eqns), key)
    runs = [run(k, [eqn for _, eqn in group]) for k, group in pairs]
    if way.every > 1:
        runs = _together(runs, way.every)
    live = {v for v in jaxpr.outvars if is_var(v)}
    found = []
    for piece in reversed(runs):
        made = dict.fromkeys(v for eqn in piece.eqns for v in eqn.outvars)
        found.append(replace(piece, outputs=[v for v in made if v in live]))
        live = (live - made.keys()) | {v for eqn in piece.eqns for v in eqn.invars if is_var(v)}
    return found[::-1]


def _together(pieces: list[Segment], every: int) -> list[Segment]:
    """Runs of `every` units, and what stands between them, as one piece each."""
    done: list[Segment] = []
    run: list[Segment] = []

    def close() -> None:
        last = max((i for i, piece in enumerate(run) if piece.units), default=-1)
        within, after = run[: last + 1], run[last + 1 :]
        if within:
            eqns = [eqn for piece in within for eqn in piece.eqns]
            done.append(Segment(eqns, sum(piece.units for piece in within), False))
        done.extend(after)
        run.clear()

    for piece in pieces:
        if not piece.nested:
            run.append(piece)
        if piece.nested or sum(p.units for p in run) == every or not any(p.units for p in run):
            close()
        if piece.nested:
            done.append(piece)
    close()
    return done


def _holds_unit(eqn: Any, units: Units) -> bool:
    return any(
        units.of(inner) is not None or _holds_unit(inner, units)
        for body in sliceable_bodies(eqn)
        for inner in body.jaxpr.eqns
    )


def _holds_lookup(eqn: Any, storage: Storage, way: Way) -> bool:
    """Whether it is, or calls, a lookup in a stored table that need not be gathered for it."""
    if eqn.primitive.name == "gather":
        table = eqn.invars[0]
        return is_var(table) and table in storage and looks_up(eqn, storage[table], way.samples)
    if eqn.primitive.name not in (*INLINED, *CHECKPOINTS):
        return False
    (body,) = sliceable_bodies(eqn)
    passed = {
        iv: storage[v]
        for v, iv in zip(body.operands, body.jaxpr.invars, strict=True)
        if is_var(v) and v in storage
    }
    return bool(passed) and any(_holds_lookup(e, passed, way) for e in body.jaxpr.eqns)


def _possible_views(jaxpr: Any, storage: Storage) -> set[Any]:
    """The stored parameters of a program and what may be views of them."""
    found = set(storage)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in VIEWS and is_var(eqn.invars[0]) and eqn.invars[0] in found:
            found.update(eqn.outvars)
    return found


def _scans_over(eqn: Any, stored: set[Any]) -> bool:
    """A scan that goes through a stored parameter slice by slice: each slice is a piece."""
    if eqn.primitive.name != "scan":
        return False
    first_xs = sum(consts_and_carry(eqn))
    return any(is_var(v) and v in stored for v in eqn.invars[first_xs:])
