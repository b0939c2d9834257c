"""The traced program, run again with its stored parameters gathered a unit at a time.

A loss is traced once with parameters as layers read them. The program is then cut where the names
of unit calls begin and end, and each piece is run by `run_piece`: its parameters come in as they
are stored. The cutting goes into jit, checkpoint, scan and cond, so it finds the layer inside a
scanned stack, and it knows nothing of Flax.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxspeed.placement.units.choose import Units, bodies
from jaxspeed.placement.units.jaxprs import (
    INLINED,
    as_function,
    bindings,
    is_var,
    open_jaxpr,
    part,
)
from jaxspeed.placement.units.lookup import look_up, looks_up
from jaxspeed.placement.units.piece import read_tied, run_piece
from jaxspeed.placement.units.stored import Stored
from jaxspeed.placement.units.views import VIEWS, view

CHECKPOINTS = ("remat2", "checkpoint")
Storage = Mapping[Any, Stored]


@dataclass(frozen=True)
class Way:
    """How pieces are run."""

    units: Units
    samples: int | None = None  # of the batch; None: no lookups by columns
    # In a user's own jax.checkpoint the recomputation gathers again by itself.
    recomputed: bool = False


@dataclass(frozen=True)
class _Piece:
    """Equations that belong together: `unit` is a serial, or None between units."""

    eqns: list[Any]
    outputs: list[Any]
    nested: bool  # a single equation that holds units, or looks up rows of a table


def run_sliced(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], storage: Storage, way: Way
) -> list[Any]:
    """Evaluate a program; `storage` tells which of its inputs are given as they are stored."""
    storage = dict(storage)
    jaxpr = _with_aliases_resolved(jaxpr)
    env = bindings(jaxpr, consts, args)

    def value(atom: Any) -> Any:
        return env[atom] if is_var(atom) else atom.val

    for piece in _pieces(jaxpr, way, storage):
        eqns = _run_views(piece.eqns, env, storage)
        if not eqns:
            continue
        if piece.nested:
            eqn = eqns[0]
            values = _NESTED[eqn.primitive.name](eqn, [value(v) for v in eqn.invars], storage, way)
            env.update(zip(eqn.outvars, values, strict=True))
            continue
        made = {v for eqn in eqns for v in eqn.outvars}
        free = list(dict.fromkeys(v for e in eqns for v in e.invars if is_var(v) and v not in made))
        weights = [v for v in free if v in storage]
        inputs = [v for v in free if v not in storage]
        outputs = [v for v in piece.outputs if v in made]
        fn = as_function(part(jaxpr, eqns, [*weights, *inputs], outputs))
        run = read_tied if way.recomputed else run_piece
        if weights:
            stored = [storage[v] for v in weights]
            values = run(fn, stored, [env[v] for v in weights], [env[v] for v in inputs])
        else:
            values = fn(*(env[v] for v in inputs))
        env.update(zip(outputs, values, strict=True))
    return [
        storage[v].read(env[v]) if is_var(v) and v in storage else value(v) for v in jaxpr.outvars
    ]


def _with_aliases_resolved(jaxpr: Any) -> Any:
    """A parameter that a jit or checkpoint hands on unchanged stays the same variable."""
    same: dict[Any, Any] = {}

    def known(v: Any) -> Any:
        return same.get(v, v) if is_var(v) else v

    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn := eqn.replace(invars=[known(v) for v in eqn.invars]))
        if eqn.primitive.name in (*INLINED, *CHECKPOINTS):
            inner = open_jaxpr(eqn.params["jaxpr"])[0]
            place = {v: i for i, v in enumerate(inner.invars)}
            for out, inner_out in zip(eqn.outvars, inner.outvars, strict=True):
                if is_var(inner_out) and inner_out in place:
                    same[out] = eqn.invars[place[inner_out]]
    return jaxpr.replace(eqns=eqns, outvars=[known(v) for v in jaxpr.outvars])


def _pieces(jaxpr: Any, way: Way, storage: Storage) -> list[_Piece]:
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

    runs = [
        (k, [eqn for _, eqn in group]) for k, group in itertools.groupby(enumerate(jaxpr.eqns), key)
    ]
    live = {v for v in jaxpr.outvars if is_var(v)}
    pieces = []
    for k, eqns in reversed(runs):
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        pieces.append(_Piece(eqns, [v for v in made if v in live], isinstance(k, tuple)))
        live = (live - made.keys()) | {v for eqn in eqns for v in eqn.invars if is_var(v)}
    return pieces[::-1]


def _holds_unit(eqn: Any, units: Units) -> bool:
    return any(
        units.of(inner) is not None or _holds_unit(inner, units)
        for body, _, _ in bodies(eqn)
        for inner in body.eqns
    )


def _holds_lookup(eqn: Any, storage: Storage, way: Way) -> bool:
    """Whether it is, or calls, a lookup in a stored table that need not be gathered for it."""
    if eqn.primitive.name == "gather":
        table = eqn.invars[0]
        return is_var(table) and table in storage and looks_up(eqn, storage[table], way.samples)
    if eqn.primitive.name not in (*INLINED, *CHECKPOINTS):
        return False
    inner = open_jaxpr(eqn.params["jaxpr"])[0]
    passed = {
        iv: storage[v]
        for v, iv in zip(eqn.invars, inner.invars, strict=True)
        if is_var(v) and v in storage
    }
    return bool(passed) and any(_holds_lookup(e, passed, way) for e in inner.eqns)


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


def consts_and_carry(scan: Any) -> tuple[int, int]:
    if "num_carry" in scan.params:
        return scan.params["num_consts"], scan.params["num_carry"]
    consts, carry = scan.params["ft_in"].unpack()[:2]  # jax 0.12
    return len(consts), len(carry)


def _run_views(eqns: list[Any], env: dict[Any, Any], storage: dict[Any, Stored]) -> list[Any]:
    """Run those equations that only look at a part of a stored parameter; the rest is returned."""
    rest = []
    for eqn in eqns:
        source = eqn.invars[0] if eqn.invars else None
        others = [v for v in eqn.invars[1:] if is_var(v)]
        if is_var(source) and source in storage and all(v in env for v in others):
            found = view(eqn, storage[source], env[source].shape)
            if found is not None:
                params, stored = found
                values = [env[v] if is_var(v) else v.val for v in eqn.invars]
                if eqn.primitive.name == "pad":
                    values[1] = values[1].astype(values[0].dtype)
                env[eqn.outvars[0]] = eqn.primitive.bind(*values, **params)
                storage[eqn.outvars[0]] = stored
                continue
        rest.append(eqn)
    return rest


Rule = Callable[[Any, Sequence[Any], Storage, Way], Sequence[Any]]


def _call(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, closed: Any = None, skip: int = 0
) -> list[Any]:
    jaxpr, consts = open_jaxpr(closed or eqn.params["jaxpr"])
    inner = {
        iv: storage[v]
        for v, iv in zip(eqn.invars[skip:], jaxpr.invars, strict=True)
        if is_var(v) and v in storage
    }
    return run_sliced(jaxpr, consts, values, inner, way)


def _checkpoint(eqn: Any, values: Sequence[Any], storage: Storage, way: Way) -> Sequence[Any]:
    inner = replace(way, recomputed=True)
    return jax.checkpoint(
        lambda *args: _call(eqn, args, storage, inner),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )(*values)


def _lookup(eqn: Any, values: Sequence[Any], storage: Storage, way: Way) -> Sequence[Any]:
    table, ids = values
    return [look_up(eqn, table, ids, storage[eqn.invars[0]])]


def _cond(eqn: Any, values: Sequence[Any], storage: Storage, way: Way) -> Sequence[Any]:
    branches = [
        lambda *args, branch=branch: _call(eqn, args, storage, way, branch, 1)
        for branch in eqn.params["branches"]
    ]
    return jax.lax.switch(values[0], branches, *values[1:])


def _scan(eqn: Any, values: Sequence[Any], storage: Storage, way: Way) -> Sequence[Any]:
    params, (jaxpr, consts) = eqn.params, open_jaxpr(eqn.params["jaxpr"])
    num_consts, num_carry = consts_and_carry(eqn)
    values, inner = list(values), {}
    for i, (v, iv) in enumerate(zip(eqn.invars, jaxpr.invars, strict=True)):
        if not (is_var(v) and v in storage):
            continue
        stored = storage[v]
        if i < num_consts:
            inner[iv] = stored
        elif i < num_consts + num_carry or stored.cut_dim == 0:
            values[i] = stored.read(values[i])  # carried, or cut along the layers: gathered before
        else:
            inner[iv] = stored.layer()

    def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        args = [*values[:num_consts], *carry, *xs]
        outs = run_sliced(jaxpr, consts, args, inner, way)
        return outs[:num_carry], outs[num_carry:]

    first_xs = num_consts + num_carry
    carry, ys = jax.lax.scan(
        body,
        values[num_consts:first_xs],
        values[first_xs:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


_NESTED: dict[str, Rule] = {
    **dict.fromkeys(INLINED, _call),
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "gather": _lookup,
    "scan": _scan,
    "cond": _cond,
}
