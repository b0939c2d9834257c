"""The planner's IR of a traced step: operations per loop, calls inlined, platform branches taken.

Dead code is removed, loop outputs included, as a compiler does: residuals for another platform's
kernel are a large part of what JAX traces.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxspeed.jaxpr.primitives import (
    CALLS,
    COLLECTIVES,
    CONSTRAINT,
    CONTROL,
    LOOPS,
    MANUAL_REGION,
    PALLAS,
)
from jaxspeed.jaxpr.traverse import bodies, called, consts_and_carry, is_var, open_jaxpr
from jaxspeed.ops.mask import NOT_ESTIMATED

PLATFORM = "platform_index"
# A shard_map region: its inputs are resharded to its in_specs (PLACED) and become per-device shards
# (ENTER); its results become global arrays (LEAVE).
PLACED, ENTER, LEAVE = "placed", "enter", "leave"
PAIRWISE = (PLACED, ENTER, LEAVE, "optimization_barrier", "device_put")
_NEVER_MERGED = {CONSTRAINT, "optimization_barrier", "device_put", "empty2"}


class Value:
    """One array of the program, with its global shape over the axes that are not manual.

    Attributes:
      spec: for each dim the mesh axes over which it is sharded, of more than one device.
      fixed: the dims whose sharding the program sets, in contrast to propagated ones.
    """

    __slots__ = ("axes", "dtype", "fixed", "host", "shape", "size", "spec")

    def __init__(self, aval: Any, manual: frozenset[str] = frozenset()) -> None:
        self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
        self.dtype = getattr(aval, "dtype", None)
        self.size = math.prod(self.shape)
        self.host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        self.spec: list[tuple[str, ...]] = [()] * len(self.shape)
        self.axes = set(manual)  # those of the spec and the manual ones, which cannot shard it
        self.fixed: frozenset[int] = frozenset()

    def of_shape(self, shape: tuple[int, ...]) -> "Value":
        """A new value that differs in its shape, before shardings are propagated."""
        new = Value(jax.ShapeDtypeStruct(shape, self.dtype), frozenset(self.axes))
        new.host = self.host
        return new


@dataclass(eq=False)
class Op:
    """One operation; `None` among its inputs is a literal.

    Attributes:
      bodies: the bodies of a loop, or the branches of a cond.
      backward: whether it belongs to a backward pass.
      rematerialized: whether it recomputes forward values in the backward pass.
      inlined: whether it was in a loop of one trip.
      scopes: for a kernel or a collective, the named scopes under which it was traced.
    """

    name: str
    params: Mapping[str, Any]
    ins: list[Value | None]
    outs: list[Value]
    bodies: list["Scope"] = field(default_factory=list)
    backward: bool = False
    rematerialized: bool = False
    trips: int = 1
    inlined: bool = False
    scopes: str = ""

    @property
    def values(self) -> list[Value]:
        return [v for v in self.ins if v is not None]


@dataclass(eq=False)
class Scope:
    """Operations in program order, with their inputs and outputs."""

    ins: list[Value]
    outs: list[Value | None]
    ops: list[Op]


def open_program(closed: Any, platform: str) -> Scope:
    """Convert a traced function for one platform ("tpu", "cuda", "cpu")."""
    scope = _Converter(platform).scope(open_jaxpr(closed)[0])
    _remove_dead(scope)
    return scope


class _Converter:
    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.manual: frozenset[str] = frozenset()  # manual axes of the enclosing regions
        self.backward = False  # inside of a backward pass
        self.rematerialized = False  # ... and of a rematerialized region
        self.scopes = ""  # named scopes of the enclosing calls
        self.merged: dict[Any, Op] = {None: None}  # type: ignore[dict-item]
        self.stacked: dict[Value, list[Value]] = {}  # by an unrolled scan: its trips' values
        self.dissolved: list[Op] = []  # loops; they exist as long as the keys of `merged`

    def value(self, variable: Any) -> Value:
        return Value(variable.aval, self.manual)

    def scope(self, jaxpr: Any) -> Scope:
        ins = [self.value(v) for v in jaxpr.invars]
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((v, self.value(v)) for v in jaxpr.constvars)
        ops: list[Op] = []
        self.run(jaxpr, env, ops, {})
        return Scope(ins, [env[v] if is_var(v) else None for v in jaxpr.outvars], ops)

    def run(
        self, jaxpr: Any, env: dict[Any, Any], ops: list[Op], chosen: dict[Any, int | None]
    ) -> None:
        """Append the operations to `ops`; `chosen` has the platform's branches."""
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            ins: list[Value | None] = [env[v] if is_var(v) else None for v in eqn.invars]
            if name == PLATFORM:
                chosen[eqn.outvars[0]] = self._branch(params["platforms"])
                env[eqn.outvars[0]] = None
            elif name == "cond" and (branch := self._taken(eqn, chosen)) is not None:
                outs = self._inline(params["branches"][branch], ins[1:], ops)
                env.update(zip(eqn.outvars, outs, strict=True))
            elif name in CALLS or name == MANUAL_REGION:
                outside = self.backward, self.rematerialized, self.scopes
                self.backward |= _is_backward(eqn)
                self.rematerialized |= bool(params.get("differentiated"))
                self.scopes += f"{eqn.source_info.name_stack}/"
                env.update(zip(eqn.outvars, self._call(eqn, ins, ops), strict=True))
                self.backward, self.rematerialized, self.scopes = outside
            elif name == "scan" and params["unroll"] >= params["length"] > 0:
                env.update(zip(eqn.outvars, self._unrolled(eqn, ins, ops), strict=True))
            elif (twin := self.merged.get(key := self._key(eqn, ins, ops))) is not None:
                env.update(zip(eqn.outvars, twin.outs, strict=True))
            elif self._is_dissolved(op := self._op(eqn, ins, [self.value(v) for v in eqn.outvars])):
                self.dissolved.append(op)
                env.update(zip(eqn.outvars, self._unrolled(eqn, ins, ops), strict=True))
            else:
                env.update(zip(eqn.outvars, op.outs, strict=True))
                ops.append(op)
                if key is not None:
                    self.merged[key] = ops[-1]

    def _key(self, eqn: Any, ins: Sequence[Value | None], ops: list[Op]) -> Any:
        """Key under which equal operations of a scope are merged (CSE); None if never."""
        name = eqn.primitive.name
        fetch = self.platform == "tpu" and name == "device_put" and ins[0] and ins[0].host
        if eqn.effects or len(eqn.outvars) != 1 or (name in _NEVER_MERGED and not fetch):
            return None
        pairs = zip(ins, eqn.invars, strict=True)
        operands = [v if v is not None else _literal(a) for v, a in pairs]
        key = (id(ops), name, *operands, tuple(sorted(eqn.params.items())))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _op(self, eqn: Any, ins: list[Value | None], outs: list[Value]) -> Op:
        name, params = eqn.primitive.name, eqn.params
        op = Op(
            name,
            params,
            ins,
            outs,
            backward=self.backward or _is_backward(eqn),
            rematerialized=self.rematerialized,
        )
        if name in PALLAS or name in COLLECTIVES:
            op.scopes = f"{self.scopes}{eqn.source_info.name_stack}"
        for body in bodies(eqn) if name in CONTROL else ():
            op.bodies.append(self.scope(body.jaxpr))
            op.trips = body.trips
        return op

    def _is_dissolved(self, op: Op) -> bool:
        """Whether XLA:TPU makes a row of a loop's two trips.

        To fetch ahead what a trip needs from host memory, it takes one trip out of the loop, and
        what is left of two is no loop (its pass collective-pipeliner-backward, libtpu 0.0.52).
        """
        if self.platform != "tpu" or op.name != "scan" or op.trips != 2:
            return False
        (body,) = op.bodies
        consts, _ = consts_and_carry(op)
        host_consts = {v for v in body.ins[:consts] if v.host}
        return any(
            o.name == "device_put" and not host_consts.isdisjoint(o.values) for o in body.ops
        )

    def _call(self, eqn: Any, ins: list[Value | None], ops: list[Op]) -> list[Value | None]:
        params, inner = eqn.params, called(eqn)
        if params.get("differentiated") and params.get("prevent_cse"):
            # Recomputed values must not be merged with the originals.
            recomputed = [self.value(v) for v in eqn.invars]
            ops.append(Op("optimization_barrier", {}, ins, recomputed))
            return self._inline(inner, recomputed, ops)
        if eqn.primitive.name != MANUAL_REGION:
            return self._inline(inner, ins, ops)
        placed = [self.value(v) for v in eqn.invars]
        ops.append(Op(PLACED, {"specs": params["in_specs"]}, ins, placed))
        outside = self.manual
        (body,) = bodies(eqn)
        self.manual |= {axis for axis, _ in body.manual}
        shards = [self.value(v) for v in body.jaxpr.invars]
        ops.append(Op(ENTER, {}, list(placed), shards))
        results = self._inline(inner, shards, ops)
        self.manual = outside
        outs = [self.value(v) for v in eqn.outvars]
        ops.append(Op(LEAVE, {"specs": params["out_specs"]}, results, outs))
        return list(outs)

    def _unrolled(self, eqn: Any, ins: list[Value | None], ops: list[Op]) -> list[Value | None]:
        """The trips of an unrolled scan, or of one with a single trip, one after the other."""
        trips, before = range(eqn.params["length"]), len(ops)
        consts, carry = consts_and_carry(eqn)
        carried = ins[consts : consts + carry]
        rows: list[list[Value | None]] = [[] for _ in eqn.outvars[carry:]]
        for i in reversed(trips) if eqn.params["reverse"] else trips:
            parts = [v and self._row(v, i, ops) for v in ins[consts + carry :]]
            outs = self._inline(called(eqn), [*ins[:consts], *carried, *parts], ops)
            carried = outs[:carry]
            for row, out in zip(rows, outs[carry:], strict=True):
                row.insert(0 if eqn.params["reverse"] else i, out)
        for op in ops[before:]:
            op.inlined |= len(trips) == 1
        return [*carried, *(self._stack(row, v, ops) for row, v in zip(rows, eqn.outvars[carry:]))]

    def _row(self, v: Value, i: int, ops: list[Op]) -> Value:
        """Row i of an array that a scan slices."""
        if v in self.stacked:
            return self.stacked[v][i]
        slice_, row = v.of_shape((1, *v.shape[1:])), v.of_shape(v.shape[1:])
        starts, limits = (i, *[0] * len(row.shape)), (i + 1, *row.shape)
        if v.shape[0] == 1:
            slice_ = v
        else:
            bounds = {"start_indices": starts, "limit_indices": limits}
            ops.append(Op("slice", bounds, [v], [slice_]))
        ops.append(Op("squeeze", {"dimensions": (0,)}, [slice_], [row]))
        return row

    def _stack(self, rows: list[Value | None], variable: Any, ops: list[Op]) -> Value:
        out = self.value(variable)
        parts = [out.of_shape((1, *out.shape[1:])) for _ in rows]
        for row, part in zip(rows, parts, strict=True):
            ops.append(Op("reshape", {"new_sizes": part.shape}, [row], [part]))
        ops.append(Op("concatenate", {"dimension": 0}, [*parts], [out]))
        if all(row is not None for row in rows):
            self.stacked[out] = [row for row in rows if row is not None]
        return out

    def _inline(
        self, closed: Any, ins: Sequence[Value | None], ops: list[Op]
    ) -> list[Value | None]:
        jaxpr, _ = open_jaxpr(closed)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((v, self.value(v)) for v in jaxpr.constvars)
        self.run(jaxpr, env, ops, {})
        return [env[v] if is_var(v) else None for v in jaxpr.outvars]

    def _branch(self, platforms: Sequence[Sequence[str] | None]) -> int | None:
        for i, names in enumerate(platforms):
            if names is None or self.platform in names:
                return i
        return None

    def _taken(self, eqn: Any, chosen: Mapping[Any, int | None]) -> int | None:
        if eqn.params.get("branches_platforms"):
            return self._branch(eqn.params["branches_platforms"])
        index = eqn.invars[0]
        if is_var(index) and index in chosen:
            return chosen[index]
        counted = [i for i, b in enumerate(eqn.params["branches"]) if not _is_not_estimated(b)]
        return counted[0] if len(counted) == 1 < len(eqn.params["branches"]) else None


def _literal(operand: Any) -> Hashable:
    """Key of a literal operand: equal for equal numbers."""
    value = getattr(operand, "val", None)
    if value is None or np.ndim(value):
        return object()
    return str(operand.aval.dtype), np.asarray(value).item()


def all_ops(scope: Scope) -> Iterator[Op]:
    for op in scope.ops:
        yield op
        for body in op.bodies:
            yield from all_ops(body)


Wires = list[tuple[Value | None, Value]]


def wires(op: Op, body: Scope) -> tuple[Wires, Wires, Wires]:
    """What becomes what around a body of a loop or cond: (inputs, outputs, carries of a loop).

    As pairs of an operand and the body's input, of the body's output and the result, and of the
    body's output and its input in the next trip.
    """
    consts, carry = consts_and_carry(op) if op.name in LOOPS else (0, 0)
    inputs = zip(op.ins[len(op.ins) - len(body.ins) :], body.ins, strict=True)
    carried = zip(body.outs, body.ins[consts : consts + carry], strict=False)
    return [*inputs], [*zip(body.outs, op.outs, strict=True)], [*carried]


def flows(scope: Scope) -> Iterator[tuple[Op, Value, Value]]:
    """Data flow of a program, loops included: (operation, what it reads, what that becomes)."""
    for op in scope.ops:
        pairs: Iterable[tuple[Value | None, Value]] = itertools.product(op.values, op.outs)
        if op.bodies:
            pairs = (pair for body in op.bodies for wired in wires(op, body) for pair in wired)
        elif op.name in PAIRWISE:
            pairs = zip(op.ins, op.outs, strict=True)
        yield from ((op, v, out) for v, out in pairs if v is not None)
        for body in op.bodies:
            yield from flows(body)


def reach[Node: Hashable](start: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> set[Node]:
    """`start`, and all that its members lead to along the edges."""
    return set(nearest_first(start, edges))


def nearest_first[Node: Hashable](
    start: Iterable[Node], edges: Iterable[tuple[Node, Node]]
) -> list[Node]:
    """What `reach` finds, by the number of edges from `start`, else in the order of both."""
    after: dict[Node, list[Node]] = defaultdict(list)
    for v, to in edges:
        after[v].append(to)
    reached = dict.fromkeys(start)
    order = [*reached]
    for v in order:
        new = [to for to in dict.fromkeys(after[v]) if to not in reached]
        reached.update(dict.fromkeys(new))
        order += new
    return order


def _is_not_estimated(branch: Any) -> bool:
    return any(
        NOT_ESTIMATED in str(eqn.source_info.name_stack) for eqn in open_jaxpr(branch)[0].eqns
    )


def _is_backward(eqn: Any) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _remove_dead(scope: Scope) -> None:
    """Remove operations, and a loop's operands and results, on which no output depends."""
    sources = [(out, v) for _, v, out in flows(scope)]
    ends = [v for v in scope.outs if v is not None]
    for op in all_ops(scope):
        if not op.outs:  # run for its effect
            ends += op.values
        elif op.name == "scan":
            consts, carry = consts_and_carry(op)
            sources += [(out, v) for out, v in zip(op.outs, op.ins[consts : consts + carry]) if v]
        elif op.bodies:  # of a while all carries are read, of a cond the index
            read = (*op.values, *op.bodies[0].outs) if op.name == "while" else op.ins[:1]
            sources += [(out, v) for out in op.outs for v in read if v]
    _remove_all_but(reach(ends, sources), scope)


def _remove_all_but(live: set[Value], scope: Scope) -> None:
    scope.ops = [op for op in scope.ops if not (op.outs and live.isdisjoint(op.outs))]
    for op in scope.ops:
        read = [out in live for out in op.outs]
        if op.name in PAIRWISE:
            op.ins = [v if on else None for v, on in zip(op.ins, read, strict=True)]
        for body in op.bodies:
            _remove_all_but(live, body)
        if op.name not in ("scan", "cond"):
            continue
        first = len(op.ins) - len(op.bodies[0].ins)
        used = {i for body in op.bodies for i, v in enumerate(body.ins, first) if v in live}
        if op.name == "scan":
            consts, carry = consts_and_carry(op)
            for i in range(carry):
                read[i] |= consts + i in used
            used |= {consts + i for i in range(carry) if read[i]}
        op.ins = [v if i in used or i < first else None for i, v in enumerate(op.ins)]
        op.outs = [out if on else _Unread for out, on in zip(op.outs, read, strict=True)]
        for body in op.bodies:
            body.outs = [v if on else None for v, on in zip(body.outs, read, strict=True)]


_Unread = Value(None)  # in place of a loop's unread output
