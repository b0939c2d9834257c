"""Segmented evaluation of a traced program: sharded parameters gathered one unit at a time.

A loss is traced once with gathered parameters. The program is then split where unit calls begin and
end (`segments`), and `SegmentVJP` runs each segment with parameters as they are stored. Bodies of
jit, checkpoint, scan and cond are split too, so the layer of a scanned stack is found, and nothing
here depends on Flax.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxspeed.jaxpr.evaluate import as_function, bindings, evaluate, run_equation
from jaxspeed.jaxpr.inline_calls import with_checkpoints_inlined
from jaxspeed.jaxpr.primitives import CHECKPOINTS, INLINED, PLAIN_CALLS
from jaxspeed.jaxpr.rewriter import Rewriter, Rewriting
from jaxspeed.jaxpr.slicing import dependents, free_variables, slice_of, sub_jaxpr
from jaxspeed.jaxpr.traverse import (
    Body,
    Jaxpr,
    JaxprEqn,
    consts_and_carry,
    equations,
    forwarded_operands,
    is_real,
    is_var,
    sliceable_bodies,
)
from jaxspeed.ops.moe.dispatch import saves_layer_inputs
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.zero3.eager_weight_grads import with_eager_weight_grads
from jaxspeed.zero3.exchange import Exchange
from jaxspeed.zero3.find_units import Units
from jaxspeed.zero3.param_views import run_view
from jaxspeed.zero3.product_vjp import wide_products, with_products
from jaxspeed.zero3.segment_vjp import SegmentVJP, exchanged_after, read, read_tied
from jaxspeed.zero3.segments import EvalContext, Segment, split_at_units
from jaxspeed.zero3.sharded_param import Storage
from jaxspeed.zero3.table_lookup import look_up


def run_segmented(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], storage: Storage, context: EvalContext
) -> list[Any]:
    """Evaluate a program; the inputs in `storage` are passed as they are stored.

    Where none is, and no unit is recomputed, there is nothing to split it for.
    """
    if not storage and context.residuals is None:
        return as_function(jaxpr, consts)(*args)
    jaxpr = _AliasesResolved().run(jaxpr)
    return _Evaluation(jaxpr, consts, args, storage, context).outputs()


class _Evaluation:
    """The state of one program's evaluation."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        storage: Storage,
        context: EvalContext,
    ) -> None:
        self.jaxpr, self.context, self.storage = jaxpr, context, dict(storage)
        self.env = bindings(jaxpr, consts, args)
        for v in _read_in_several_places(jaxpr, self.storage):
            # One copy: gradients are summed on the device, and only their sum is transferred.
            self.env[v] = on_device(self.env[v])
            self.storage[v] = self.storage[v].on_device()
        self.exchanged: list[Any] = []  # the results of the last segment with parameters
        self.moving = dependents(jaxpr, context.activations) if context.residuals else set()
        self.segments = split_at_units(jaxpr, context, storage)
        units = [s for s in self.segments if s.units]
        self.readers = Counter(v for s in units for v in free_variables(s.eqns))

    def outputs(self) -> list[Any]:
        """Run the segments in order."""
        for segment in self.segments:
            eqns = self._without_views(segment.eqns)
            if not eqns:
                continue
            run = self._nested if segment.nested else self._plain
            self._order(segment, eqns)
            run(segment, eqns)
        return [
            read(self.context.exchange, [self.storage[v]], [self.env[v]])[0]
            if is_var(v) and v in self.storage
            else self._value(v)
            for v in self.jaxpr.outvars
        ]

    def _value(self, atom: Any) -> Any:
        return self.env[atom] if is_var(atom) else atom.val

    def _without_views(self, eqns: list[JaxprEqn]) -> list[JaxprEqn]:
        """Run the equations that are views of stored parameters, and return the others."""
        rest = []
        for eqn in eqns:
            source, viewed = next(iter(eqn.invars), None), None
            known = all(v in self.env for v in eqn.invars if is_var(v))
            if is_var(source) and source in self.storage and known:
                values = [self._value(v) for v in eqn.invars]
                viewed = run_view(eqn, self.storage[source], values)
            if viewed is None:
                rest.append(eqn)
            else:
                self.env[eqn.outvars[0]], self.storage[eqn.outvars[0]] = viewed
        return rest

    def _order(self, segment: Segment, eqns: list[JaxprEqn]) -> None:
        """Order the exchanges of a segment after those of the one before, where data has to."""
        weights = [v for v in free_variables(eqns) if v in self.storage and is_real(v)]
        exchange = self.context.exchange_of(weights)
        if not exchange.in_order:
            return
        if self.exchanged:
            shards, first = ([self.env[v] for v in vs] for vs in (weights, self.exchanged))
            self.env.update(zip(weights, exchanged_after(exchange, shards, first), strict=True))
        self.exchanged = [v for v in segment.outputs if is_real(v)]

    def _nested(self, segment: Segment, eqns: list[JaxprEqn]) -> None:
        eqn = eqns[0]
        values = _NESTED[eqn.primitive.name](
            eqn, [self._value(v) for v in eqn.invars], self.storage, self.context, self.moving
        )
        self.env.update(zip(eqn.outvars, values, strict=True))

    def _without_keys(self, eqns: list[JaxprEqn], outputs: list[Any]) -> list[Any]:
        """Compute the random keys of a segment before it runs, and return its other results.

        All results of a segment have tangents, and JAX differentiates no `random_clone`.
        """
        rest = []
        for v in outputs:
            key = jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
            key_eqns = slice_of(self.jaxpr, eqns, (), [v]).eqns if key else []
            free = free_variables(key_eqns)
            if not key_eqns or any(x in self.storage for x in free):
                rest.append(v)
            else:
                program = sub_jaxpr(self.jaxpr, key_eqns, free, [v])
                self.env[v] = evaluate(program, (), [self.env[x] for x in free])[0]
        return rest

    def _plain(self, segment: Segment, eqns: list[JaxprEqn]) -> None:
        env, storage, context = self.env, self.storage, self.context
        free = free_variables(eqns)
        produced = {v for eqn in eqns for v in eqn.outvars}
        weights = [v for v in free if v in storage]
        inputs = [v for v in free if v not in storage]
        outputs = [v for v in segment.outputs if v in produced]
        if weights:
            outputs = self._without_keys(eqns, outputs)
        program = sub_jaxpr(self.jaxpr, eqns, [*weights, *inputs], outputs)
        if context.residuals is not None and segment.units:
            # It is recomputed with its unit. Then its products can gather their own weights.
            program = with_checkpoints_inlined(program, saves_layer_inputs)
            eqns = program.eqns
        stored = {v: storage[v] for v in weights}
        # Where nothing is recomputed, each operand would be a residual behind a barrier, besides
        # what XLA computes it from.
        alone = context.residuals is not None and segment.units == 1
        divisible = alone and not context.exchange.per_rank  # rings fuse a unit's parameters
        products = wide_products(program, stored) if divisible else []
        if products:  # their weights are passed as stored, like other inputs
            product_weights = [product.weight for product in products]
            weights, inputs = (
                [v for v in weights if v not in product_weights],
                [*product_weights, *inputs],
            )
            program = sub_jaxpr(self.jaxpr, eqns, [*weights, *inputs], outputs)
            inside = replace(context, recomputed=True, residuals=None)
            fn = with_products(
                program,
                products,
                stored,
                context.exchange,
                lambda eqn, values, owned: _checkpointed_branches(eqn, values, owned, inside),
            )
            stored = {v: storage[v] for v in weights}
        else:
            fn = with_eager_weight_grads(program, stored)
        values = [env[v] for v in inputs]
        shards = [env[v] for v in weights]
        exchange = context.exchange_of(stored)
        if not (context.residuals and segment.units):
            outs: Sequence[Any]
            if not weights:
                outs = fn(*values)
            elif context.recomputed:
                outs = read_tied(exchange, fn, list(stored.values()), shards, values)
            else:
                outs = SegmentVJP(fn, list(stored.values()), exchange)(shards, values)
            env.update(zip(outputs, outs))
            return
        unshared = [v in self.moving and self.readers[v] == 1 for v in inputs]
        if segment.units == 1:
            fn = context.residuals.rematerialized(fn, context.in_loop)
            gathered = list(stored.values())
        else:  # each unit gathers its own weights; only the first one's inputs are saved
            inner = replace(context, residuals=None)

            def together(*args: Any) -> list[Any]:
                return run_segmented(program, (), args, stored, inner)

            fn = context.residuals.rematerialized(together, context.in_loop)
            gathered, shards, values = [], [], [*shards, *values]
            unshared = [*(False for _ in weights), *unshared]
        run = SegmentVJP(fn, gathered, exchange, context.residuals, unshared)
        env.update(zip(outputs, run(shards, values)))


def _read_in_several_places(jaxpr: Jaxpr, storage: Storage) -> list[Any]:
    """Offloaded parameters with several readers; each trip of a loop that reads one is a reader."""
    uses: Counter[Any] = Counter(v for v in jaxpr.outvars if is_var(v))
    for eqn in jaxpr.eqns:
        each_trip = sum(consts_and_carry(eqn)) if eqn.primitive.name == "scan" else 0
        for i, v in enumerate(eqn.invars):
            if is_var(v):
                uses[v] += 2 if i < each_trip else 1
    return [v for v, stored in storage.items() if stored.on_host and uses[v] > 1]


class _AliasesResolved(Rewriter[None]):
    """Parameters that a jit or checkpoint returns unchanged keep their variable."""

    enters = ()

    def other(self, program: Rewriting[None], eqn: JaxprEqn) -> list[None]:
        program.emit(eqn)
        if eqn.primitive.name in PLAIN_CALLS and sliceable_bodies(eqn):
            operands = zip(eqn.outvars, forwarded_operands(eqn), strict=True)
            same = {out: program.atom(eqn.invars[i]) for out, i in operands if i is not None}
            program.replace(same.keys(), same.values())
        return [None] * len(eqn.outvars)


Rule = Callable[[Any, Sequence[Any], Storage, EvalContext, set[Any]], Sequence[Any]]


def _run_body(
    body: Body, values: Sequence[Any], storage: Storage, context: EvalContext, moving: set[Any]
) -> list[Any]:
    passed = dict(zip(body.jaxpr.invars, body.operands, strict=True))
    inside = context.inside(passed, moving)
    return run_segmented(body.jaxpr, body.consts, values, body.passed(storage), inside)


def _call(
    eqn: JaxprEqn, values: Sequence[Any], storage: Storage, context: EvalContext, moving: set[Any]
) -> Sequence[Any]:
    (body,) = sliceable_bodies(eqn)
    return _run_body(body, values, storage, context, moving)


def _checkpoint(
    eqn: JaxprEqn, values: Sequence[Any], storage: Storage, context: EvalContext, moving: set[Any]
) -> Sequence[Any]:
    inner = replace(context, recomputed=True, residuals=None)
    run = jax.checkpoint(
        lambda *args: _call(eqn, args, storage, inner, moving),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    exchange = context.exchange_of([v for v in eqn.invars if is_var(v) and v in storage])
    return SegmentVJP(run, (), exchange)((), values) if exchange.in_order else run(*values)


def _checkpointed_branches(
    eqn: JaxprEqn, values: Sequence[Any], storage: Storage, context: EvalContext
) -> Sequence[Any]:
    """A checkpoint of a `cond` within a unit: the branch that runs gathers what it reads."""
    (body,) = sliceable_bodies(eqn)
    stored = body.passed(storage)

    def run(*args: Any) -> list[Any]:
        env = bindings(body.jaxpr, body.consts, args)
        for inner in body.jaxpr.eqns:
            if inner.primitive.name == "cond":
                operands = [env[v] if is_var(v) else v.val for v in inner.invars]
                outs: Sequence[Any] = _cond(inner, operands, stored, context, set())
            else:
                assert stored.keys().isdisjoint(v for v in inner.invars if is_var(v))
                outs = run_equation(body.jaxpr, inner, env.__getitem__)
            env.update(zip(inner.outvars, outs, strict=True))
        return [env[v] if is_var(v) else v.val for v in body.jaxpr.outvars]

    how = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **how)(*values)


def _lookup(
    eqn: JaxprEqn, values: Sequence[Any], storage: Storage, context: EvalContext, moving: set[Any]
) -> Sequence[Any]:
    table, ids = values
    return [look_up(eqn, table, ids, storage[eqn.invars[0]])]


def _cond(
    eqn: JaxprEqn, values: Sequence[Any], storage: Storage, context: EvalContext, moving: set[Any]
) -> Sequence[Any]:
    branches = [
        lambda *args, body=body: _run_body(body, args, storage, context, moving)
        for body in sliceable_bodies(eqn)
    ]
    return jax.lax.switch(values[0], branches, *values[1:])


def _scan(
    eqn: JaxprEqn, values: Sequence[Any], storage: Storage, context: EvalContext, moving: set[Any]
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
        elif (
            i < num_consts + num_carry
            or stored.sharded_dim == 0
            or any(part.blocks[:1] != (1,) for _, part in stored.parts)
        ):
            # Carried, or sharded or encoded along the layers: gathered before.
            (values[i],) = read(context.exchange, [stored], [values[i]])
        else:
            inner[iv] = stored.layer()
    passed = dict(zip(jaxpr.invars[num_consts:], body.operands[num_consts:], strict=True))
    loops = _stays_a_loop(body.trips, eqn.params["unroll"])
    context = context.inside(passed, moving, in_loop=context.in_loop or loops)

    def run(context: EvalContext, consts: Sequence[Any], carry: Any, xs: Any, length: int) -> Any:
        def trip(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = run_segmented(jaxpr, body.consts, [*consts, *carry, *xs], inner, context)
            return outs[:num_carry], outs[num_carry:]

        how = {key: eqn.params[key] for key in ("reverse", "unroll")}
        return jax.lax.scan(trip, carry, xs, length=length, **how)

    first_xs = num_consts + num_carry
    parts = values[:num_consts], values[num_consts:first_xs], values[first_xs:]
    if context.every == 1 or not _repeats_units(jaxpr, context.units):
        carry, ys = run(context, *parts, body.trips)
        return [*carry, *ys]
    exchange = context.exchange_of(inner)
    return _scan_of_groups(run, parts, body.trips, eqn.params["reverse"], context, exchange)


def _stays_a_loop(trips: int, unroll: int = 1) -> bool:
    """Whether a compiled scan has all of its trips in a loop: no other trip is unrolled."""
    return trips // unroll > 1 and trips % unroll == 0


def _repeats_units(jaxpr: Jaxpr, units: Units) -> bool:
    """Whether each trip of a scan runs units itself, and not by an inner scan."""

    def entered(eqn: JaxprEqn) -> list[Body]:
        return [] if eqn.primitive.name == "scan" else sliceable_bodies(eqn)

    return any(units.of(eqn) is not None for eqn in equations(jaxpr.eqns, entered))


def _scan_of_groups(
    run: Any,
    parts: Any,
    length: int,
    reverse: bool,
    context: EvalContext,
    exchange: Exchange,
) -> list[Any]:
    """A scan over groups of trips that are rematerialized together: each group saves its input."""
    consts, start, xs = parts
    residuals, inner = context.residuals, replace(context, residuals=None)
    assert residuals is not None
    every = residuals.every
    assert length % every == 0, "refused when the config is resolved against the model"

    def group(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def together(*args: Any) -> list[Any]:
            operands = iter(args)
            groups = [[next(operands) for _ in like] for like in (consts, carry, xs)]
            carry_, ys = run(inner, *groups, every)
            return [*carry_, *ys]

        unshared = [False] * len(consts) + [True] * len(carry) + [False] * len(xs)
        args = [*consts, *carry, *xs]
        fn = residuals.rematerialized(together, _stays_a_loop(length // every))
        outs = SegmentVJP(fn, (), exchange, residuals, unshared)((), args)
        return outs[: len(carry)], outs[len(carry) :]

    grouped = jax.tree.map(lambda x: x.reshape(length // every, every, *x.shape[1:]), list(xs))
    carry, ys = jax.lax.scan(group, start, grouped, length=length // every, reverse=reverse)
    return [*carry, *(y.reshape(length, *y.shape[2:]) for y in ys)]


_NESTED: dict[str, Rule] = {
    **dict.fromkeys(INLINED, _call),
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "gather": _lookup,
    "scan": _scan,
    "cond": _cond,
}
