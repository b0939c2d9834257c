"""The collectives of a step, each at its place in the opened program.

A partitioner exchanges where an operation wants an array to lie otherwise than it does:

- A constraint (or a region's, or a loop's door) that takes an axis from a dim gathers over it; one
  that adds an axis slices, which costs nothing; one that moves it to another dim is an all-to-all.
- A product whose contracted dim is cut, a sum over a cut dim and a lookup in a cut table give
  partial sums. They are reduced where something other than a sum or a view reads them: to parts
  (reduce-scatter) where they lie cut over that axis by then, else whole (all-reduce).
- In regions that are manual over an axis the program says itself what it exchanges.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxspeed.communication import Communication, dtypes_text
from jaxspeed.jaxpr.primitives import REDUCTIONS, RESHAPES, SCATTERS
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.planner.memory.classify import Kinds
from jaxspeed.planner.memory.partitioning import CONSTRAINT, ties_of
from jaxspeed.planner.memory.tiles import Sizes
from jaxspeed.planner.memory.trace_ir import (
    ENTER,
    LEAVE,
    PLACED,
    Op,
    Scope,
    Value,
)

_SUMS_OF_SUMS = {"add", "add_any", "sub"}
_PASS = {CONSTRAINT, *RESHAPES, "convert_element_type", "name", "transpose", "neg"}
_SAID = {  # by a manual region: its primitive, and what it is
    "psum": "all-reduce", "psum2": "all-reduce", "psum_invariant": "all-reduce",
    "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "ppermute": "collective-permute", "pbroadcast": "all-reduce",
}  # fmt: skip
_NOWHERE = {"pvary", "pcast", "axis_index", ENTER, LEAVE}


@dataclass(frozen=True, eq=False)
class CollectiveOp:
    """A communication at its place in the program.

    Attributes:
      communication: its purpose is "parameters", "gradients", "activations" or "stages".
      value: what is sent.
      scope: in which it runs.
      op: of that scope, which waits for it or has made what is sent.
      before: whether it runs before `op`, or after it.
    """

    communication: Communication
    value: Value
    scope: Scope
    op: Op
    before: bool


def traffic(scope: Scope, sizes: Sizes, kinds: Kinds, state: int) -> list[CollectiveOp]:
    """All that is sent, in the order of the program.

    Args:
      state: how many of its inputs are the state, and of its outputs the next one.
    """
    walk = _Walk(scope, sizes, kinds, 1)
    walk.run()
    walk.stored(state)
    return walk.found


class _Walk:
    def __init__(self, scope: Scope, sizes: Sizes, kinds: Kinds, runs: int) -> None:
        self.scope, self.sizes, self.kinds = scope, sizes, kinds
        self.mesh: Mapping[str, int] = sizes.mesh
        self.runs = runs
        self.makers = {v: op for op in scope.ops for v in op.outs}
        self.readers: dict[Value, int] = defaultdict(int)
        for op in scope.ops:
            for v in set(op.values):
                self.readers[v] += 1
        for given in scope.outs:
            if given is not None:
                self.readers[given] += 1
        self.pending: dict[Value, tuple[set[str], Value]] = {}  # axes, and as what it was made
        self.gathered: set[tuple[Value, str]] = set()
        self.found: list[CollectiveOp] = []

    def run(self) -> list[CollectiveOp]:
        for op in self.scope.ops:
            self._settle(op)
            if op.name in _NOWHERE:
                continue
            if op.bodies:
                self._loop(op)
            elif op.name in _SAID:
                self._said(op)
            elif op.name == "pallas_call":  # in a region that is manual over all that cuts
                continue
            elif op.name in (CONSTRAINT, PLACED, "device_put"):
                for v, out in zip(op.ins, op.outs, strict=True):
                    if v is not None and v.host == out.host:  # else a host transfer
                        self._lie(v, out.cut, op)
            else:
                self._operate(op)
        for end in self.scope.outs:
            if end in self.pending:
                self._reduce(end)
        return self.found

    # -- what an operation wants -----------------------------------------------------------------

    def _operate(self, op: Op) -> None:
        """An operation that runs on each device's parts, and what that takes."""
        out = op.outs[0]
        wanted: dict[tuple[Value, int], set[str]] = defaultdict(set)
        for v, d, to, e in ties_of(op):
            wanted[v, d] |= set(to.cut[e])
        partial: set[str] = set()
        for v, d, axes in self._summed(op):
            wanted[v, d] |= axes
            partial |= axes
        for v, d in (*_batching(op), *_filled(op)):
            wanted[v, d] |= set(v.cut[d])
        for v in dict.fromkeys(op.values):
            if v.cut and any(v.cut):
                cut = [tuple(a for a in e if a in wanted[v, d]) for d, e in enumerate(v.cut)]
                self._lie(v, cut, op)
        partial = {a for a in partial if self.mesh[a] > 1}
        if partial:
            if op.name in REDUCTIONS and op.name not in ("reduce", "reduce_sum"):
                self._send("all-reduce", partial, out, op, before=False)
            else:
                self.pending[out] = (partial, out)

    def _summed(self, op: Op) -> Iterator[tuple[Value, int, set[str]]]:
        """Dims that the devices of some axes may each sum over their part of."""
        if op.name == "dot_general":
            yield from self._contracted(op)
        elif op.name in REDUCTIONS:
            for v in op.values:
                for d in op.params.get("axes", op.params.get("dimensions", ())):
                    yield v, int(d), set(v.cut[int(d)])
        elif op.name == "gather" and op.ins[0] is not None:
            table, sizes = op.ins[0], op.params["slice_sizes"]
            batching = getattr(op.params["dimension_numbers"], "operand_batching_dims", ())
            for d, size in enumerate(sizes):
                if size != table.shape[d] and d not in batching:
                    yield table, d, set(table.cut[d])
        elif op.name in SCATTERS:
            yield from self._scattered(op)

    def _contracted(self, op: Op) -> Iterator[tuple[Value, int, set[str]]]:
        (lhs, rhs), _ = op.params["dimension_numbers"]
        left, right = op.ins[0], op.ins[1]
        for d, e in zip(map(int, lhs), map(int, rhs), strict=True):
            for v, at, other, there in ((left, d, right, e), (right, e, left, d)):
                if v is None:
                    continue
                elsewhere = (
                    {a for k, cut in enumerate(other.cut) if k != there for a in cut}
                    if other is not None
                    else set()
                )
                yield v, at, set(v.cut[at]) - elsewhere

    def _scattered(self, op: Op) -> Iterator[tuple[Value, int, set[str]]]:
        """Each device adds its own updates; what a table's part lacks it passes over."""
        into, updates = op.ins[0], op.ins[2] if len(op.ins) > 2 else None
        numbers = op.params["dimension_numbers"]
        batching = getattr(numbers, "scatter_indices_batching_dims", ())
        if updates is None:
            return
        held = {a for cut in op.outs[0].cut for a in cut} if into is not None else set()
        for d, cut in enumerate(updates.cut):
            if d not in numbers.update_window_dims and not batching:
                yield updates, d, set(cut) if op.name == "scatter-add" else set(cut) - held

    # -- what that sends -------------------------------------------------------------------------

    def _lie(
        self, v: Value, cut: Sequence[tuple[str, ...]], op: Op, *, before: bool = True
    ) -> None:
        """`v` shall lie cut so: what is gathered, and what changes its dim."""
        if len(cut) != len(v.cut):
            return
        spread = self._spread(v)
        if spread is not None and spread.ins[0] is not None:
            v, dims = spread.ins[0], spread.params["broadcast_dimensions"]
            cut = [cut[int(e)] if n > 1 else v.cut[d] for d, (n, e) in _dims(v, dims)]
        there = {a for e in cut for a in e}
        moved = {a for e, new in zip(v.cut, cut, strict=True) for a in e if a not in new}
        moved = {a for a in moved if self.mesh[a] > 1}
        gathers = {a for a in moved - there if (v, a) not in self.gathered}
        changes = {a for a in moved & there if (v, a) not in self.gathered}
        self.gathered |= {(v, a) for a in moved}
        if changes:
            self._send("all-to-all", changes, v, op, before=before)
        if gathers:
            self._send("all-gather", gathers, v, op, before=before)

    def _spread(self, v: Value) -> Op | None:
        """The operation that has spread a smaller array to this one: the smaller one is sent."""
        maker = self.makers.get(v)
        while maker and maker.name in (CONSTRAINT, "convert_element_type"):
            v = maker.ins[0] if maker.ins[0] is not None else v
            maker = self.makers.get(v) if maker.ins[0] is not None else None
        return maker if maker and maker.name == "broadcast_in_dim" else None

    def _settle(self, op: Op) -> None:
        """Reduces the partial sums that this operation reads, or hands them on."""
        read = [v for v in dict.fromkeys(op.values) if v in self.pending]
        if not read:
            return
        alone = all(self.readers[v] == 1 for v in read)
        axes = [self.pending[v][0] for v in read]
        out = op.outs[0] if op.outs else None
        like = len({frozenset(a) for a in axes}) == 1
        arrays = [v for v in op.values if v.shape]
        goes_on = op.name in _PASS and len(read) == 1
        adds_up = op.name in _SUMS_OF_SUMS and len(read) == len(set(arrays)) > 1 and like
        if alone and out is not None and (goes_on or adds_up):
            made = self.pending[read[0]][1]
            for v in read:
                del self.pending[v]
            self.pending[out] = (axes[0], made)
            return
        for v in read:
            self._reduce(v)

    def _reduce(self, v: Value) -> None:
        axes, made = self.pending.pop(v)
        cut, op = {a for e in v.cut for a in e}, self.makers[v]
        if axes & cut:
            self._send("reduce-scatter", axes & cut, v, op, made, before=False)
        if axes - cut:
            self._send("all-reduce", axes - cut, v, op, made, before=False)

    def _send(
        self,
        kind: str,
        axes: set[str],
        v: Value,
        op: Op,
        made: Value | None = None,
        *,
        before: bool = True,
    ) -> None:
        """`v` is what a device has before a gather, and after the others; `made` what was summed,
        in the dtype in which it is sent."""
        ordered = tuple(a for a in self.mesh if a in axes and self.mesh[a] > 1)
        ways = math.prod(self.mesh[a] for a in ordered)
        if ways == 1 or v.dtype is None or not v.size:
            return
        own = self.sizes.plain(v) * _width(made or v) / max(_width(v), 1)
        payload = own * ways if kind in ("all-gather", "reduce-scatter") else own
        self._add(kind, ordered, int(payload), v, op, made or v, before=before)

    def _add(
        self,
        kind: str,
        axes: tuple[str, ...],
        payload: int,
        v: Value,
        op: Op,
        made: Value,
        *,
        before: bool = True,
    ) -> None:
        communication = Communication(
            kind,
            axes,
            payload,
            self.runs,
            "trace",
            dtypes_text([made.dtype]),
            payload // _width(made),
            group_size=math.prod(self.mesh[a] for a in axes),
            purpose=self._purpose(v, kind, axes),
            backward=op.backward,
        )
        self.found.append(CollectiveOp(communication, v, self.scope, op, before))

    def _purpose(self, v: Value, kind: str, axes: tuple[str, ...]) -> str:
        of_stages = "pipe" in axes and kind in ("collective-permute", "all-reduce")
        if of_stages and v not in self.kinds.gradients:
            return "stages"
        of_batch = v in self.kinds.of_batch
        if v in self.kinds.gradients:
            return "parameters" if kind == "all-gather" else "gradients"
        if v in self.kinds.of_state and not of_batch:
            return "parameters"
        return "activations"

    # -- what the program says itself ------------------------------------------------------------

    def _said(self, op: Op) -> None:
        params = op.params
        named = params.get("axes", params.get("axis_name", params.get("axis", ())))
        axes = set(named if isinstance(named, (tuple, list, set, frozenset)) else (named,))
        axes = {a for a in axes if isinstance(a, str)}
        kind = _SAID[op.name]
        for v, out in zip(op.ins, op.outs, strict=False):
            if v is None:
                continue
            if kind in ("all-gather",):  # the operand is a part: `_send` multiplies
                self._send(kind, axes, v, op)
            elif kind == "reduce-scatter":
                self._send(kind, axes, out, op)
            else:
                self._send(kind, axes, v, op)

    # -- loops -----------------------------------------------------------------------------------

    def _loop(self, op: Op) -> None:
        """Of branches the one that sends most."""
        best: list[CollectiveOp] = []
        for body in op.bodies:
            within = _Walk(body, self.sizes, self.kinds, self.runs * max(op.trips, 1))
            if op.name == "scan":
                self._doors_in(op, within)
            within.run()
            if op.name == "scan":
                within.doors_out(op)
            if _sum(within.found) >= _sum(best):
                best = within.found
        self.found += best

    def stored(self, state: int) -> None:
        """The next state comes to lie as the last one does."""
        for v, place in zip(self.scope.outs[:state], self.scope.ins[:state], strict=True):
            if v in self.makers and v is not None:
                self._lie(v, place.cut, self.makers[v], before=False)

    def _doors_in(self, op: Op, within: "_Walk") -> None:
        consts, carry = consts_and_carry(op)
        for i, (v, inner) in enumerate(zip(op.ins, within.scope.ins, strict=True)):
            if v is None:
                continue
            if i < consts + carry:
                self._lie(v, inner.cut, op)
            else:
                within.part_of(v.cut[1:], inner)

    def part_of(self, cut: Sequence[tuple[str, ...]], inner: Value) -> None:
        """A trip's part of an array lies otherwise than the array."""
        now = {a for e in inner.cut for a in e}
        axes = {a for e in cut for a in e if a not in now and self.mesh[a] > 1}
        reader = next((op for op in self.scope.ops if inner in op.values), None)
        if axes and reader:
            self._send("all-gather", axes, _cut_as(inner, cut), reader)

    def doors_out(self, op: Op) -> None:
        consts, carry = consts_and_carry(op)
        wanted = [v.cut for v in self.scope.ins[consts : consts + carry]]
        wanted += [out.cut[1:] for out in op.outs[carry:]]
        for v, cut in zip(self.scope.outs, wanted, strict=True):
            if v is not None and v in self.makers:
                self._lie(v, cut, self.makers[v], before=False)


def _filled(op: Op) -> Iterator[tuple[Value, int]]:
    """Dims that are filled up, or cut to size: neighbours exchange their edges, which is little."""
    if op.name in ("slice", "pad") and op.ins[0] is not None:
        yield from ((op.ins[0], d) for d in range(len(op.ins[0].shape)))


def _batching(op: Op) -> Iterator[tuple[Value, int]]:
    """Dims of a lookup along which tables and indices go together."""
    if op.name != "gather" and op.name not in SCATTERS:
        return
    numbers = op.params["dimension_numbers"]
    batching = getattr(numbers, "operand_batching_dims", ())
    if op.name == "gather":
        if op.ins[0] is not None:
            yield from ((op.ins[0], int(d)) for d in batching)
    elif batching and (updates := op.ins[2]) is not None:
        window = numbers.update_window_dims
        yield from ((updates, d) for d in range(len(updates.shape)) if d not in window)


def _dims(v: Value, dims: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(dim of `v`, (its size, which dim of what it is spread to it becomes))."""
    yield from enumerate(zip(v.shape, dims, strict=True))


def _cut_as(value: Value, cut: Sequence[tuple[str, ...]]) -> Value:
    new = Value(None)
    new.shape, new.dtype, new.size, new.host = value.shape, value.dtype, value.size, value.host
    new.cut = list(cut)
    return new


def _sum(found: Sequence[CollectiveOp]) -> int:
    return sum(one.communication.payload for one in found)


def _width(v: Value) -> int:
    return int(getattr(v.dtype, "itemsize", 4) or 4)
