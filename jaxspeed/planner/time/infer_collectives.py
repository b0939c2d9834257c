"""Collectives that XLA's partitioner inserts into a step, each at its place in the traced program.

A collective is needed where an operation requires another sharding of an array than it has:

- A constraint, or the entry of a region or loop, that removes an axis from a dim is an all-gather;
  one that adds an axis is a slice, which is free; one that moves it to another dim an all-to-all.
- A matmul with a sharded contracted dim, a reduction over a sharded dim and a lookup in a sharded
  table give partial sums. They are reduced where anything but a sum or a view reads them: by a
  reduce-scatter where the result is sharded over that axis, else by an all-reduce.
- In regions that are manual over an axis the collectives are in the program.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxspeed.axes import PIPE
from jaxspeed.communication import Communication, dtype_text
from jaxspeed.jaxpr.primitives import (
    ADDITIONS,
    COLLECTIVES,
    CONSTRAINT,
    GROUPED_PRODUCTS,
    PALLAS,
    PLACES,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
)
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.placement.owned import SCOPE as OWNERS
from jaxspeed.placement.specs import num_shards
from jaxspeed.planner.trace.classify import Kinds
from jaxspeed.planner.trace.partitioning import merged_dims, relations_of, ties_of
from jaxspeed.planner.trace.tiles import Sizes
from jaxspeed.planner.trace.trace_ir import ENTER, LEAVE, PLACED, Op, Scope, Value
from jaxspeed.planner.trace.traced_step import TracedPhase

_PASS = {CONSTRAINT, *RESHAPES, "convert_element_type", "name", "transpose", "neg"}
_PARTIAL = {"dot_general", "gather", *REDUCTIONS, *SCATTERS}  # give partial sums of sharded dims
_FREE = {*PLACES, ENTER, LEAVE}


@dataclass(frozen=True, eq=False)
class CollectiveOp:
    """A communication at its place in the program.

    Attributes:
      communication: its purpose is "parameters", "gradients", "activations", "stages" or
        "matrices", which go to their owners.
      value: the array that is sent.
      scope: the scope in which it runs.
      op: the operation of that scope that reads the result or computes the array that is sent.
      before: whether it runs before `op`, or after it.
    """

    communication: Communication
    value: Value
    scope: Scope
    op: Op
    before: bool


def infer_collectives(phase: TracedPhase) -> list[CollectiveOp]:
    """The communications of a program, in its order."""
    inference = _Inference(phase.scope, phase.sizes, phase.kinds, 1)
    inference.run()
    inference.reshard_state(phase.donated)
    return inference.found


class _Inference:
    def __init__(self, scope: Scope, sizes: Sizes, kinds: Kinds, runs: int) -> None:
        self.scope, self.sizes, self.kinds = scope, sizes, kinds
        self.mesh: Mapping[str, int] = sizes.mesh
        self.runs = runs
        self.producers = {v: op for op in scope.ops for v in op.outs}
        self.readers: dict[Value, int] = defaultdict(int)
        for op in scope.ops:
            for v in set(op.values):
                self.readers[v] += 1
        for out in scope.outs:
            if out is not None:
                self.readers[out] += 1
        self.pending: dict[Value, tuple[set[str], Value]] = {}  # partial sums: axes, original value
        self.gathered: set[tuple[Value, str]] = set()
        self.found: list[CollectiveOp] = []

    def run(self) -> list[CollectiveOp]:
        for op in self.scope.ops:
            self._reduce_operands(op)
            if op.name in _FREE:
                continue
            if op.bodies:
                self._loop(op)
            elif op.name in COLLECTIVES:
                self._explicit(op)
            # In a region that is manual over all sharded axes.
            elif op.name in PALLAS or op.name in GROUPED_PRODUCTS:
                continue
            elif op.name in (CONSTRAINT, PLACED, "device_put"):
                for v, out in zip(op.ins, op.outs, strict=True):
                    if v is not None and v.host == out.host:  # else a host transfer
                        self._reshard(v, out.spec, op)
            else:
                self._operate(op)
        for end in self.scope.outs:
            if end in self.pending:
                self._reduce(end)
        return self.found

    # -- required shardings ----------------------------------------------------------------------

    def _operate(self, op: Op) -> None:
        """Reshard the operands so that the operation runs on local shards."""
        out = op.outs[0]
        required: dict[tuple[Value, int], set[str]] = defaultdict(set)
        for v, d, to, e in ties_of(op):
            required[v, d] |= set(to.spec[e])
        partial: set[str] = set()
        for v, d, axes in self._summed(op):
            required[v, d] |= axes
            partial |= axes
        for v, d in _local(op):
            required[v, d] |= set(v.spec[d])
        for v in dict.fromkeys(op.values):
            if v.spec and any(v.spec):
                spec = [tuple(a for a in e if a in required[v, d]) for d, e in enumerate(v.spec)]
                self._reshard(v, spec, op)
        if partial:
            if op.name in REDUCTIONS and op.name not in ("reduce", "reduce_sum"):
                self._send("all-reduce", partial, out, op, before=False)
            else:
                self.pending[out] = (partial, out)

    def _summed(self, op: Op) -> Iterator[tuple[Value, int, set[str]]]:
        """Sharded dims over which the result is a partial sum: (operand, dim, axes)."""
        if op.name not in _PARTIAL or (op.name in SCATTERS and any(_local(op))):
            return
        known, out = relations_of(op), op.outs[0]
        out_factors = {f for factors in known.results for f in factors}
        for i, (v, factors) in enumerate(zip(op.ins, known.operands, strict=True)):
            for d, factor in enumerate(factors if v is not None else ()):
                if v is None or (factor is not None and factor in out_factors):
                    continue
                axes = set(v.spec[d])
                if op.name == "dot_general":
                    other, there = op.ins[1 - i], known.operands[1 - i].index(factor)
                    if other is not None:
                        axes -= {a for k, e in enumerate(other.spec) if k != there for a in e}
                elif op.name == "gather" and i > 0:
                    continue
                elif op.name in SCATTERS:
                    # Each device adds its updates, and skips indices outside of its shard.
                    if i < 2 or factor is None:
                        continue
                    if op.name != "scatter-add" and op.ins[0] is not None:
                        axes -= {a for e in out.spec for a in e}
                yield v, d, axes

    # -- the resulting collectives ---------------------------------------------------------------

    def _reshard(
        self, v: Value, spec: Sequence[tuple[str, ...]], op: Op, *, before: bool = True
    ) -> None:
        """Reshard `v`: all-gather removed axes, all-to-all those that change their dim."""
        if len(spec) != len(v.spec):
            return
        broadcast = self._broadcast_of(v)
        if broadcast is not None and broadcast.ins[0] is not None:
            v, dims = broadcast.ins[0], broadcast.params["broadcast_dimensions"]
            places = zip(v.shape, v.spec, dims, strict=True)
            spec = [spec[int(e)] if n > 1 else current for n, current, e in places]
        remaining = {a for e in spec for a in e}
        moved = {a for e, new in zip(v.spec, spec, strict=True) for a in e if a not in new}
        gathers = {a for a in moved - remaining if (v, a) not in self.gathered}
        changes = {a for a in moved & remaining if (v, a) not in self.gathered}
        self.gathered |= {(v, a) for a in moved}
        if changes:
            self._send("all-to-all", changes, v, op, before=before)
        if gathers:
            self._send("all-gather", gathers, v, op, before=before)

    def _broadcast_of(self, v: Value) -> Op | None:
        """The broadcast of a smaller array that gave this value: the smaller array is sent."""
        producer = self.producers.get(v)
        while producer and producer.name in (CONSTRAINT, "convert_element_type"):
            v = producer.ins[0] if producer.ins[0] is not None else v
            producer = self.producers.get(v) if producer.ins[0] is not None else None
        return producer if producer and producer.name == "broadcast_in_dim" else None

    def _reduce_operands(self, op: Op) -> None:
        """Reduce the partial sums that this operation reads, or defer them to its result."""
        read = [v for v in dict.fromkeys(op.values) if v in self.pending]
        if not read:
            return
        alone = all(self.readers[v] == 1 for v in read)
        axes = [self.pending[v][0] for v in read]
        out = op.outs[0] if op.outs else None
        like = len({frozenset(a) for a in axes}) == 1
        arrays = [v for v in op.values if v.shape]
        passes = op.name in _PASS and len(read) == 1
        adds_up = op.name in ADDITIONS and len(read) == len(set(arrays)) > 1 and like
        if alone and out is not None and (passes or adds_up):
            original = self.pending[read[0]][1]
            for v in read:
                del self.pending[v]
            self.pending[out] = (axes[0], original)
            return
        for v in read:
            self._reduce(v)

    def _reduce(self, v: Value) -> None:
        axes, original = self.pending.pop(v)
        spec, op = {a for e in v.spec for a in e}, self.producers[v]
        if axes & spec:
            self._send("reduce-scatter", axes & spec, v, op, original, before=False)
        if axes - spec:
            self._send("all-reduce", axes - spec, v, op, original, before=False)

    def _send(
        self,
        kind: str,
        axes: set[str],
        v: Value,
        op: Op,
        original: Value | None = None,
        *,
        before: bool = True,
    ) -> None:
        """Record a collective.

        `v` is the shard before an all-gather, the result of the others; `original` is the partial
        sum, whose dtype is sent.
        """
        ordered = tuple(a for a in self.mesh if a in axes and self.mesh[a] > 1)
        shards, sent = num_shards(ordered, self.mesh), original or v
        if shards == 1 or v.dtype is None or not v.size:
            return
        local = self.sizes.plain(v) * _width(sent) / max(_width(v), 1)
        payload = int(local * shards if kind in ("all-gather", "reduce-scatter") else local)
        communication = Communication(
            kind,
            ordered,
            payload,
            self.runs,
            "trace",
            dtype_text(sent.dtype),
            payload // _width(sent),
            group_size=shards,
            purpose=self._purpose(v, kind, ordered, op),
            backward=op.backward,
        )
        self.found.append(CollectiveOp(communication, v, self.scope, op, before))

    def _purpose(self, v: Value, kind: str, axes: tuple[str, ...], op: Op) -> str:
        if OWNERS in op.scopes.split("/"):
            return "matrices"
        of_stages = PIPE in axes and kind in ("collective-permute", "all-reduce")
        if of_stages and v not in self.kinds.gradients:
            return "stages"
        of_batch = v in self.kinds.of_batch
        if v in self.kinds.gradients:
            return "parameters" if kind == "all-gather" else "gradients"
        if v in self.kinds.of_state and not of_batch:
            return "parameters"
        return "activations"

    # -- explicit collectives of the program -----------------------------------------------------

    def _explicit(self, op: Op) -> None:
        params = op.params
        named = params.get("axes", params.get("axis_name", params.get("axis", ())))
        axes = set(named if isinstance(named, (tuple, list, set, frozenset)) else (named,))
        axes = {a for a in axes if isinstance(a, str)}
        kind = COLLECTIVES[op.name]
        for v, out in zip(op.ins, op.outs, strict=False):
            if v is not None:  # of an all-gather the operand is a shard: `_send` multiplies
                self._send(kind, axes, out if kind == "reduce-scatter" else v, op)

    # -- loops -----------------------------------------------------------------------------------

    def _loop(self, op: Op) -> None:
        """Add the collectives of the body, or of the branch that sends most."""
        best: list[CollectiveOp] = []
        for body in op.bodies:
            within = _Inference(body, self.sizes, self.kinds, self.runs * max(op.trips, 1))
            if op.name == "scan":
                self._reshard_inputs(op, within)
            within.run()
            if op.name == "scan":
                within.reshard_outputs(op)
            if _sum(within.found) >= _sum(best):
                best = within.found
        self.found += best

    def reshard_state(self, donated: Sequence[Value | None]) -> None:
        """Reshard the next state as the current one, which it replaces."""
        for v, place in zip(self.scope.outs, donated, strict=True):
            if place is not None and v in self.producers and v is not None:
                self._reshard(v, place.spec, self.producers[v], before=False)

    def _reshard_inputs(self, op: Op, within: "_Inference") -> None:
        consts, carry = consts_and_carry(op)
        for i, (v, inner) in enumerate(zip(op.ins, within.scope.ins, strict=True)):
            if v is None:
                continue
            if i < consts + carry:
                self._reshard(v, inner.spec, op)
            else:
                within.gather_slice(v.spec[1:], inner)

    def gather_slice(self, spec: Sequence[tuple[str, ...]], inner: Value) -> None:
        """Gather a scanned array's slice whose sharding differs from the array's."""
        current = {a for e in inner.spec for a in e}
        axes = {a for e in spec for a in e if a not in current}
        reader = next((op for op in self.scope.ops if inner in op.values), None)
        if axes and reader:
            shard = copy.copy(inner)
            shard.spec = list(spec)
            self._send("all-gather", axes, shard, reader)

    def reshard_outputs(self, op: Op) -> None:
        consts, carry = consts_and_carry(op)
        required = [v.spec for v in self.scope.ins[consts : consts + carry]]
        required += [out.spec[1:] for out in op.outs[carry:]]
        for v, spec in zip(self.scope.outs, required, strict=True):
            if v is not None and v in self.producers:
                self._reshard(v, spec, self.producers[v], before=False)


def _local(op: Op) -> Iterator[tuple[Value, int]]:
    """Dims that stay sharded: of a merged dim, batching, padded and sliced ones.

    Of those neighbours exchange only their edges, which is neglected.
    """
    first, numbers = op.ins[0] if op.ins else None, op.params.get("dimension_numbers")
    batching = getattr(numbers, "operand_batching_dims", ())
    if op.name == "reshape" and first is not None:
        for olds, e in merged_dims(op):
            if op.outs[0].spec[e] == tuple(axis for d in olds for axis in first.spec[d]):
                yield from ((first, d) for d in olds)
    elif op.name in ("slice", "pad") and first is not None:
        yield from ((first, d) for d in range(len(first.shape)))
    elif op.name == "gather" and first is not None:
        yield from ((first, int(d)) for d in batching)
    elif op.name in SCATTERS and batching and (updates := op.ins[2]) is not None:
        window = op.params["dimension_numbers"].update_window_dims
        yield from ((updates, d) for d in range(len(updates.shape)) if d not in window)


def _sum(collectives: Sequence[CollectiveOp]) -> int:
    return sum(collective.communication.payload for collective in collectives)


def _width(v: Value) -> int:
    return int(getattr(v.dtype, "itemsize", 4) or 4)
