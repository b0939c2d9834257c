"""Segmented evaluation of a traced program: sharded parameters gathered one unit at a time.

A loss is traced once with parameters as layers read them. The program is then cut where the names
of unit calls begin and end, and each piece is run by `run_piece`: its parameters come in as they
are stored. The cutting goes into jit, checkpoint, scan and cond, so it finds the layer inside a
scanned stack, and it knows nothing of Flax.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.jaxpr.evaluate import bindings
from jaxspeed.jaxpr.inline_calls import renamed
from jaxspeed.jaxpr.primitives import CHECKPOINTS, INLINED
from jaxspeed.jaxpr.slicing import made_of, part, read_from_outside
from jaxspeed.jaxpr.traverse import (
    Body,
    consts_and_carry,
    forwarded_operands,
    is_var,
    sliceable_bodies,
)
from jaxspeed.zero3.eager_weight_grads import in_turn
from jaxspeed.zero3.find_units import Units
from jaxspeed.zero3.param_views import view
from jaxspeed.zero3.segment_vjp import read, read_tied, run_piece
from jaxspeed.zero3.segments import Segment, Storage, Way, pieces
from jaxspeed.zero3.sharded_param import ShardedParam
from jaxspeed.zero3.table_lookup import look_up


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
        self.moving = made_of(jaxpr, way.activations) if way.residuals else set()
        self.pieces = pieces(jaxpr, way, storage)
        units = [p for p in self.pieces if p.units]
        self.readers = Counter(v for p in units for v in read_from_outside(p.eqns))

    def outputs(self) -> list[Any]:
        """Run the pieces one after the other."""
        for piece in self.pieces:
            eqns = _run_views(piece.eqns, self.env, self.storage)
            if not eqns:
                continue
            run = self._nested if piece.nested else self._plain
            run(piece, eqns)
        return [
            read([self.storage[v]], [self.env[v]])[0]
            if is_var(v) and v in self.storage
            else self._value(v)
            for v in self.jaxpr.outvars
        ]

    def _value(self, atom: Any) -> Any:
        return self.env[atom] if is_var(atom) else atom.val

    def _nested(self, piece: Segment, eqns: list[Any]) -> None:
        eqn = eqns[0]
        values = _NESTED[eqn.primitive.name](
            eqn, [self._value(v) for v in eqn.invars], self.storage, self.way, self.moving
        )
        self.env.update(zip(eqn.outvars, values, strict=True))

    def _plain(self, piece: Segment, eqns: list[Any]) -> None:
        env, storage, way = self.env, self.storage, self.way
        free = read_from_outside(eqns)
        made = {v for eqn in eqns for v in eqn.outvars}
        weights = [v for v in free if v in storage]
        inputs = [v for v in free if v not in storage]
        outputs = [v for v in piece.outputs if v in made]
        program = part(self.jaxpr, eqns, [*weights, *inputs], outputs)
        values = [env[v] for v in inputs]
        stored = {v: storage[v] for v in weights}
        shards = [env[v] for v in weights]
        if not (way.residuals and piece.units):
            run = read_tied if way.recomputed else run_piece
            fn = _in_turn(program, stored)
            given = list(stored.values()), shards, values
            env.update(zip(outputs, run(fn, *given) if weights else fn(*values)))
            return
        own = [v in self.moving and self.readers[v] == 1 for v in inputs]
        if piece.units == 1:
            fn = way.residuals.rematerialized(_in_turn(program, stored), way.in_loop)
            given = list(stored.values()), shards, values
        else:  # each gathers its own weights, and all keep only what the first was handed
            inner = replace(way, residuals=None)

            def together(*args: Any) -> list[Any]:
                return run_sliced(program, (), args, stored, inner)

            fn = way.residuals.rematerialized(together, way.in_loop)
            given, own = ([], [], [*shards, *values]), [*(False for _ in shards), *own]
        env.update(zip(outputs, run_piece(fn, *given, way.residuals, own)))


def _in_turn(program: Any, stored: Storage) -> Callable[..., list[Any]]:
    return in_turn(program, [v for v, s in stored.items() if s.trainable])


def _read_in_several_places(jaxpr: Any, storage: Storage) -> list[Any]:
    """What waits in host memory and is no layer's alone: what a loop reads in each trip, too."""
    uses: Counter[Any] = Counter(v for v in jaxpr.outvars if is_var(v))
    for eqn in jaxpr.eqns:
        each_trip = sum(consts_and_carry(eqn)) if eqn.primitive.name == "scan" else 0
        for i, v in enumerate(eqn.invars):
            if is_var(v):
                uses[v] += 2 if i < each_trip else 1
    return [v for v, stored in storage.items() if stored.on_host and uses[v] > 1]


def _with_aliases_resolved(jaxpr: Any) -> Any:
    """A parameter that a jit or checkpoint hands on unchanged stays the same variable."""
    same: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn := eqn.replace(invars=renamed(eqn.invars, same)))
        if eqn.primitive.name in (*INLINED, *CHECKPOINTS):
            operands = zip(eqn.outvars, forwarded_operands(eqn), strict=True)
            same.update((out, eqn.invars[i]) for out, i in operands if i is not None)
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, same))


def _run_views(eqns: list[Any], env: dict[Any, Any], storage: dict[Any, ShardedParam]) -> list[Any]:
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


def _run_body(
    body: Body, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> list[Any]:
    passed = dict(zip(body.jaxpr.invars, body.operands, strict=True))
    inner = {iv: storage[v] for iv, v in passed.items() if is_var(v) and v in storage}
    return run_sliced(body.jaxpr, body.consts, values, inner, way.inside(passed, moving))


def _call(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    (body,) = sliceable_bodies(eqn)
    return _run_body(body, values, storage, way, moving)


def _checkpoint(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    inner = replace(way, recomputed=True, residuals=None)
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
        lambda *args, body=body: _run_body(body, args, storage, way, moving)
        for body in sliceable_bodies(eqn)
    ]
    return jax.lax.switch(values[0], branches, *values[1:])


def _scan(
    eqn: Any, values: Sequence[Any], storage: Storage, way: Way, moving: set[Any]
) -> Sequence[Any]:
    (body,) = sliceable_bodies(eqn)
    jaxpr, num_consts, num_carry = body.jaxpr, body.num_consts, body.num_carry
    values, inner = list(values), {}
    for i, (v, iv) in enumerate(zip(body.operands, jaxpr.invars, strict=True)):
        if not (is_var(v) and v in storage):
            continue
        stored = storage[v]
        if i < num_consts:
            inner[iv] = stored
        elif i < num_consts + num_carry or stored.sharded_dim == 0:
            # Carried, or sharded along the layers: gathered before.
            (values[i],) = read([stored], [values[i]])
        else:
            inner[iv] = stored.layer()
    passed = dict(zip(jaxpr.invars[num_consts:], body.operands[num_consts:], strict=True))
    way = way.inside(passed, moving, in_loop=True)

    def run(way: Way, consts: Sequence[Any], carry: Any, xs: Any, length: int) -> Any:
        def trip(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = run_sliced(jaxpr, body.consts, [*consts, *carry, *xs], inner, way)
            return outs[:num_carry], outs[num_carry:]

        how = {key: eqn.params[key] for key in ("reverse", "unroll")}
        return jax.lax.scan(trip, carry, xs, length=length, **how)

    first_xs = num_consts + num_carry
    split = values[:num_consts], values[num_consts:first_xs], values[first_xs:]
    if way.every == 1 or not _repeats_units(jaxpr, way.units):
        carry, ys = run(way, *split, body.trips)
        return [*carry, *ys]
    return _scan_of_groups(run, split, body.trips, eqn.params["reverse"], way)


def _repeats_units(jaxpr: Any, units: Units) -> bool:
    """Whether each trip of a scan runs units, not a scan of its own that does."""
    return any(
        units.of(eqn) is not None
        or (
            eqn.primitive.name != "scan"
            and any(_repeats_units(body.jaxpr, units) for body in sliceable_bodies(eqn))
        )
        for eqn in jaxpr.eqns
    )


def _scan_of_groups(run: Any, split: Any, length: int, reverse: bool, way: Way) -> list[Any]:
    """A scan whose trips are made again several together: of those only the first's input waits."""
    consts, start, xs = split
    residuals, inner = way.residuals, replace(way, residuals=None)
    assert residuals is not None
    every = residuals.every
    assert length % every == 0, "refused where the config is read against the model"

    def group(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def together(*args: Any) -> list[Any]:
            given = iter(args)
            parts = [[next(given) for _ in like] for like in (consts, carry, xs)]
            carry_, ys = run(inner, *parts, every)
            return [*carry_, *ys]

        own = [False] * len(consts) + [True] * len(carry) + [False] * len(xs)
        args = [*consts, *carry, *xs]
        outs = run_piece(residuals.rematerialized(together, True), (), (), args, residuals, own)
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
