"""Split a traced program into segments: the equations of one unit, of several, or between units.

A call or loop that contains units is a segment of its own, which is split recursively.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspeed.jaxpr.primitives import PLAIN_CALLS
from jaxspeed.jaxpr.traverse import (
    Jaxpr,
    JaxprEqn,
    consts_and_carry,
    equations,
    is_var,
    sliceable_bodies,
)
from jaxspeed.zero3.exchange import BY_CONSTRAINT, Exchange
from jaxspeed.zero3.find_units import Units
from jaxspeed.zero3.param_views import VIEWS
from jaxspeed.zero3.residual_policy import ResidualPolicy
from jaxspeed.zero3.sharded_param import Storage
from jaxspeed.zero3.table_lookup import looks_up


@dataclass(frozen=True)
class EvalContext:
    """How segments are evaluated."""

    units: Units
    samples: int | None = None  # batch size; None: no lookups in column-sharded tables
    # Inside of a model's jax.checkpoint, whose recomputation gathers again and saves nothing.
    recomputed: bool = False
    residuals: ResidualPolicy | None = None  # None: all residuals of a unit are saved
    # Variables of this program that depend on the batch and are not loop-invariant: residuals
    # computed from them may be offloaded or sharded further.
    activations: frozenset[Any] = frozenset()
    in_loop: bool = False
    exchange: Exchange = BY_CONSTRAINT

    def exchange_of(self, stored: Collection[Any]) -> Exchange:
        """The exchange of a segment that gathers these parameters."""
        return self.exchange if stored else BY_CONSTRAINT

    @property
    def every(self) -> int:
        """Number of units that are rematerialized together."""
        return self.residuals.every if self.residuals else 1

    def inside(self, inner: Mapping[Any, Any], moving: set[Any], **changes: Any) -> "EvalContext":
        """The same for an equation's inner program; `inner` maps its inputs to the outer ones."""
        activations = frozenset(iv for iv, v in inner.items() if is_var(v) and v in moving)
        return replace(self, activations=activations, **changes)


@dataclass(frozen=True)
class Segment:
    """Equations that are evaluated together."""

    eqns: list[JaxprEqn]
    units: int  # number of units; several are rematerialized together
    nested: bool  # a single equation that contains units, or looks up rows of a table
    outputs: Sequence[Any] = ()  # variables that later equations read


def split_at_units(jaxpr: Jaxpr, context: EvalContext, storage: Storage) -> list[Segment]:
    """Maximal runs of equations of one unit (or of none), with the outputs that others read."""

    views = _possible_views(jaxpr, storage)

    def key(pair: tuple[int, Any]) -> Any:
        index, eqn = pair
        if _holds_lookup(eqn, storage, context):
            return ("nested", index)
        serial = context.units.of(eqn)
        if serial is not None:
            return serial
        inner = equations([eqn], sliceable_bodies)
        nested = any(context.units.of(e) is not None for e in inner) or _scans_over(eqn, views)
        return ("nested", index) if nested else None

    def run(k: Any, eqns: list[JaxprEqn]) -> Segment:
        nested = isinstance(k, tuple)
        return Segment(eqns, 0 if nested or k is None else 1, nested)

    pairs = itertools.groupby(enumerate(jaxpr.eqns), key)
    runs = [run(k, [eqn for _, eqn in group]) for k, group in pairs]
    if context.every > 1:
        runs = _together(runs, context.every)
    live = {v for v in jaxpr.outvars if is_var(v)}
    segments = []
    for segment in reversed(runs):
        results = dict.fromkeys(v for eqn in segment.eqns for v in eqn.outvars)
        segments.append(replace(segment, outputs=[v for v in results if v in live]))
        live = (live - results.keys()) | {
            v for eqn in segment.eqns for v in eqn.invars if is_var(v)
        }
    return segments[::-1]


def _together(segments: list[Segment], every: int) -> list[Segment]:
    """Merge each run of `every` units, and the equations between them, into one segment."""
    done: list[Segment] = []
    run: list[Segment] = []

    def close() -> None:
        last = max((i for i, segment in enumerate(run) if segment.units), default=-1)
        within, after = run[: last + 1], run[last + 1 :]
        if within:
            eqns = [eqn for segment in within for eqn in segment.eqns]
            done.append(Segment(eqns, sum(segment.units for segment in within), False))
        done.extend(after)
        run.clear()

    for segment in segments:
        if not segment.nested:
            run.append(segment)
        if segment.nested or sum(s.units for s in run) == every or not any(s.units for s in run):
            close()
        if segment.nested:
            done.append(segment)
    close()
    return done


def _holds_lookup(eqn: JaxprEqn, storage: Storage, context: EvalContext) -> bool:
    """Whether an equation is, or calls, a lookup that does not need the table gathered."""
    if eqn.primitive.name == "gather":
        table = eqn.invars[0]
        return is_var(table) and table in storage and looks_up(eqn, storage[table], context.samples)
    return eqn.primitive.name in PLAIN_CALLS and any(
        _holds_lookup(inner, passed, context)
        for body in sliceable_bodies(eqn)
        if (passed := body.passed(storage))
        for inner in body.jaxpr.eqns
    )


def _possible_views(jaxpr: Jaxpr, storage: Storage) -> set[Any]:
    """The stored parameters of a program and the variables that may be views of them."""
    views = set(storage)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in VIEWS and is_var(eqn.invars[0]) and eqn.invars[0] in views:
            views.update(eqn.outvars)
    return views


def _scans_over(eqn: JaxprEqn, stored: set[Any]) -> bool:
    """Whether an equation is a scan over the slices of a stored parameter."""
    if eqn.primitive.name != "scan":
        return False
    first_xs = sum(consts_and_carry(eqn))
    return any(is_var(v) and v in stored for v in eqn.invars[first_xs:])
