"""The traced program, run again with its stored parameters gathered a unit at a time.

A loss is traced once with parameters as layers read them. The program is then cut where the names
of unit calls begin and end, and each piece is run by `run_piece`: its parameters come in as they
are stored. The cutting goes into jit, checkpoint, scan and cond, so it finds the layer inside a
scanned stack, and it knows nothing of Flax.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxspeed.placement.units.choose import Units, bodies
from jaxspeed.placement.units.jaxprs import (
    INLINED,
    bindings,
    called,
    is_var,
    open_jaxpr,
    part,
)
from jaxspeed.placement.units.keeping import Keeping, made_of
from jaxspeed.placement.units.lookup import look_up, looks_up
from jaxspeed.placement.units.piece import read_tied, run_piece
from jaxspeed.placement.units.products import in_turn
from jaxspeed.placement.units.stored import Stored
from jaxspeed.placement.units.views import VIEWS, view

CHECKPOINTS = ("remat2", "checkpoint")
Storage = Mapping[Any, Stored]


@dataclass(frozen=True)
class Way:
    """How pieces are run."""

    units: Units
    samples: int | None = None  # of the batch; None: no lookups by columns
    # In a user's own jax.checkpoint the recomputation gathers again by itself, and keeps nothing.
    recomputed: bool = False
    keeping: Keeping | None = None  # None: units keep whatever their derivative needs
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
class Piece:
    """Equations that belong together."""

    eqns: list[Any]
    units: int  # how many of them: more than one are made again together
    nested: bool  # a single equation that holds units, or looks up rows of a table
    outputs: Sequence[Any] = ()  # what it hands on


def run_sliced(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], storage: Storage, way: Way
) -> list[Any]:
    """Evaluate a program; `storage` tells which of its inputs are given as they are stored."""
    return _Run(_with_aliases_resolved(jaxpr), consts, args, storage, way).outputs()


class _Run:
    """One program under way."""

    def __init__(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], storage: Storage, way: Way
    ) -> None:
        self.jaxpr, self.way, self.storage = jaxpr, way, dict(storage)
        self.env = bindings(jaxpr, consts, args)
        for v in _read_in_several_places(jaxpr, self.storage):
            # Once, so that its gradients add up on the device, and only their sum leaves.
            self.env[v] = self.storage[v].brought(self.env[v])
            self.storage[v] = self.storage[v].on_device()
        self.moving = made_of(jaxpr, way.activations) if way.keeping else set()
        self.pieces = pieces(jaxpr, way, storage)
        units = [p for p in self.pieces if p.units]
        self.readers = Counter(v for p in units for v in _read_from_outside(p.eqns))

    def outputs(self) -> list[Any]:
        """Run the pieces one after the other."""
        for piece in self.pieces:
            eqns = _run_views(piece.eqns, self.env, self.storage)
            if not eqns:
                continue
            run = self._nested if piece.nested else self._plain
            run(piece, eqns)
        return [
            self.storage[v].read(self.env[v]) if is_var(v) and v in self.storage else self._value(v)
            for v in self.jaxpr.outvars
        ]

    def _value(self, atom: Any) -> Any:
        return self.env[atom] if is_var(atom) else atom.val

    def _nested(self, piece: Piece, eqns: list[Any]) -> None:
        eqn = eqns[0]
        values = _NESTED[eqn.primitive.name](
            eqn, [self._value(v) for v in eqn.invars], self.storage, self.way, self.moving
        )
        self.env.update(zip(eqn.outvars, values, strict=True))

    def _plain(self, piece: Piece, eqns: list[Any]) -> None:
        env, storage, way = self.env, self.storage, self.way
        free = _read_from_outside(eqns)
        made = {v for eqn in eqns for v in eqn.outvars}
        weights = [v for v in free if v in storage]
        inputs = [v for v in free if v not in storage]
        outputs = [v for v in piece.outputs if v in made]
        program = part(self.jaxpr, eqns, [*weights, *inputs], outputs)
        values = [env[v] for v in inputs]
        if not (way.keeping and piece.units):
            read = [storage[v] for v in weights], [env[v] for v in weights]
            run = read_tied if way.recomputed else run_piece
            fn = _in_turn(program, {v: storage[v] for v in weights})
            env.update(zip(outputs, run(fn, *read, values) if weights else fn(*values)))
            return
        own = [v in self.moving and self.readers[v] == 1 for v in inputs]
        stored = {v: storage[v] for v in weights}
        run_kept = _run_units if piece.units > 1 else _run_unit
        args = [env[v] for v in weights], values
        env.update(zip(outputs, run_kept(program, stored, *args, own, way, way.keeping)))


def _in_turn(program: Any, stored: Storage) -> Callable[..., list[Any]]:
    return in_turn(program, [v for v, s in stored.items() if s.trainable])


def _run_unit(
    program: Any,
    stored: Storage,
    weights: Sequence[Any],
    inputs: Sequence[Any],
    own: Sequence[bool],
    way: Way,
    keeping: Keeping,
) -> Sequence[Any]:
    fn = keeping.again(_in_turn(program, stored), way.in_loop)
    return run_piece(fn, list(stored.values()), weights, inputs, keeping, own)


def _run_units(
    program: Any,
    stored: Storage,
    weights: Sequence[Any],
    inputs: Sequence[Any],
    own: Sequence[bool],
    way: Way,
    keeping: Keeping,
) -> Sequence[Any]:
    """Several units: each gathers its own weights, and all keep only what the first was handed."""
    inner = replace(way, keeping=None)

    def run(*args: Any) -> Sequence[Any]:
        return run_sliced(program, (), args, stored, inner)

    again = keeping.again(run, way.in_loop)
    args = [*weights, *inputs]
    return run_piece(again, (), (), args, keeping, [*(False for _ in weights), *own])


def _read_in_several_places(jaxpr: Any, storage: Storage) -> list[Any]:
    """What waits in host memory and is no layer's alone: what a loop reads in each trip, too."""
    uses: Counter[Any] = Counter(v for v in jaxpr.outvars if is_var(v))
    for eqn in jaxpr.eqns:
        each_trip = sum(consts_and_carry(eqn)) if eqn.primitive.name == "scan" else 0
        for i, v in enumerate(eqn.invars):
            if is_var(v):
                uses[v] += 2 if i < each_trip else 1
    return [v for v, stored in storage.items() if stored.on_host and uses[v] > 1]


def _read_from_outside(eqns: Sequence[Any]) -> list[Any]:
    """The variables that these equations read and do not make."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = (v for eqn in eqns for v in eqn.invars if is_var(v) and v not in made)
    return list(dict.fromkeys(read))


def _with_aliases_resolved(jaxpr: Any) -> Any:
    """A parameter that a jit or checkpoint hands on unchanged stays the same variable."""
    same: dict[Any, Any] = {}

    def known(v: Any) -> Any:
        return same.get(v, v) if is_var(v) else v

    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn := eqn.replace(invars=[known(v) for v in eqn.invars]))
        if eqn.primitive.name in (*INLINED, *CHECKPOINTS):
            inner = open_jaxpr(called(eqn))[0]
            place = {v: i for i, v in enumerate(inner.invars)}
            for out, inner_out in zip(eqn.outvars, inner.outvars, strict=True):
                if is_var(inner_out) and inner_out in place:
                    same[out] = eqn.invars[place[inner_out]]
    return jaxpr.replace(eqns=eqns, outvars=[known(v) for v in jaxpr.outvars])


def pieces(jaxpr: Any, way: Way, storage: Storage) -> list[Piece]:
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

    def run(k: Any, eqns: list[Any]) -> Piece:
        nested = isinstance(k, tuple)
        return Piece(eqns, 0 if nested or k is None else 1, nested)

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


def _together(pieces: list[Piece], every: int) -> list[Piece]:
    """Runs of `every` units, and what stands between them, as one piece each."""
    done: list[Piece] = []
    run: list[Piece] = []

    def close() -> None:
        last = max((i for i, piece in enumerate(run) if piece.units), default=-1)
        within, after = run[: last + 1], run[last + 1 :]
        if within:
            eqns = [eqn for piece in within for eqn in piece.eqns]
            done.append(Piece(eqns, sum(piece.units for piece in within), False))
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
    inner = open_jaxpr(called(eqn))[0]
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


Rule = Callable[[Any, Sequence[Any], Storage, Way, set[Any]], Sequence[Any]]


def _call(
    eqn: Any,
    values: Sequence[Any],
    storage: Storage,
    way: Way,
    moving: set[Any],
    closed: Any = None,
    skip: int = 0,
) -> list[Any]:
    jaxpr, consts = open_jaxpr(closed or called(eqn))
    passed = dict(zip(jaxpr.invars, eqn.invars[skip:], strict=True))
    inner = {iv: storage[v] for iv, v in passed.items() if is_var(v) and v in storage}
    return run_sliced(jaxpr, consts, values, inner, way.inside(passed, moving))


def _checkpoint(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    inner = replace(way, recomputed=True, keeping=None)
    return jax.checkpoint(
        lambda *args: _call(eqn, args, storage, inner, moving),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )(*values)


def _lookup(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    table, ids = values
    return [look_up(eqn, table, ids, storage[eqn.invars[0]])]


def _cond(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    branches = [
        lambda *args, branch=branch: _call(eqn, args, storage, way, moving, branch, 1)
        for branch in eqn.params["branches"]
    ]
    return jax.lax.switch(values[0], branches, *values[1:])


def _scan(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    params, (jaxpr, consts) = eqn.params, open_jaxpr(called(eqn))
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
    passed = dict(zip(jaxpr.invars[num_consts:], eqn.invars[num_consts:], strict=True))
    way = way.inside(passed, moving, in_loop=True)

    def run(way: Way, consts_: Sequence[Any], carry: Any, xs: Any, length: int) -> Any:
        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = run_sliced(jaxpr, consts, [*consts_, *carry, *xs], inner, way)
            return outs[:num_carry], outs[num_carry:]

        how = {key: params[key] for key in ("reverse", "unroll")}
        return jax.lax.scan(body, carry, xs, length=length, **how)

    first_xs = num_consts + num_carry
    split = values[:num_consts], values[num_consts:first_xs], values[first_xs:]
    if way.every == 1 or not _repeats_units(jaxpr, way.units):
        carry, ys = run(way, *split, params["length"])
        return [*carry, *ys]
    return _scan_of_groups(run, split, params["length"], params["reverse"], way)


def _repeats_units(jaxpr: Any, units: Units) -> bool:
    """Whether each trip of a scan runs units, not a scan of its own that does."""
    return any(
        units.of(eqn) is not None
        or (eqn.primitive.name != "scan" and any(_repeats_units(b, units) for b, *_ in bodies(eqn)))
        for eqn in jaxpr.eqns
    )


def _scan_of_groups(run: Any, split: Any, length: int, reverse: bool, way: Way) -> list[Any]:
    """A scan whose trips are made again several together: of those only the first's input waits."""
    consts, start, xs = split
    keeping, inner = way.keeping, replace(way, keeping=None)
    assert keeping is not None
    every = keeping.every
    assert length % every == 0, "refused where the config is read against the model"

    def group(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def together(*args: Any) -> list[Any]:
            given = iter(args)
            parts = [[next(given) for _ in like] for like in (consts, carry, xs)]
            carry_, ys = run(inner, *parts, every)
            return [*carry_, *ys]

        own = [False] * len(consts) + [True] * len(carry) + [False] * len(xs)
        args = [*consts, *carry, *xs]
        outs = run_piece(keeping.again(together, True), (), (), args, keeping, own)
        return outs[: len(carry)], outs[len(carry) :]

    grouped = [x.reshape(length // every, every, *x.shape[1:]) for x in xs]
    carry, ys = jax.lax.scan(group, start, grouped, length=length // every, reverse=reverse)
    return [*carry, *(y.reshape(length, *y.shape[2:]) for y in ys)]


_NESTED: dict[str, Rule] = {
    **dict.fromkeys(INLINED, _call),
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "gather": _lookup,
    "scan": _scan,
    "cond": _cond,
}
