"""Donated arguments: which results are written into their buffers and when, and their copies.

A result of the step is written into the buffer of the argument that it replaces.
"""

from collections.abc import Iterator, Mapping, Sequence, Set

from jaxspeed.jaxpr.primitives import CASTS, CONSTRAINT
from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.planner.memory.op_order import Lifetime, OrderedScope
from jaxspeed.planner.trace.materialization import OUT, VIEWS
from jaxspeed.planner.trace.tiles import Sizes, local_shape
from jaxspeed.planner.trace.trace_ir import PAIRWISE, Op, Value, wires

_VIEWS_AND_CASTS = {*VIEWS, *PAIRWISE, *CASTS, "reduce_precision"}


class DonatedScope(OrderedScope):
    """A scope with the results that are written into its arguments, and copies of these."""

    def rounded(self, times: Sequence[int]) -> Iterator[Lifetime]:
        """Copies in 16 bits of fp32 arrays of which loops multiply the slices, on a TPU.

        XLA:TPU moves the rounding of weights out of the loops over layers and micro-batches.
        """
        loops: dict[Value, set[int]] = {}
        for i, op in enumerate(self.scope.ops):
            if op.name == "scan":
                for v, inner in wires(op, op.bodies[0])[0]:
                    stored = v and self.root(v)
                    if stored and inner in self.sizes.narrow and stored not in self.sizes.narrow:
                        loops.setdefault(stored, set()).add(times[i])
        for value, by in loops.items():
            if not value.host:
                yield Lifetime(min(by), max(by), value, self.sizes.of(value) // 2)

    def written_in_place(self) -> tuple[set[Value], set[Value]]:
        """Outputs written directly into their final buffer, and other outputs that a loop stacks.

        The latter are copied into their final buffer.
        """
        free: set[Value] = set()
        stacked: set[Value] = set()
        if not (self.donated or self.depth):
            return free, stacked
        for i, out in enumerate(self.scope.outs):
            if out is None:
                continue
            r = self.root(out)
            if r not in self.materialized:
                continue
            place = self.donated[i] if i < len(self.donated) else None
            if place is None:  # a slice of a loop's stacked output
                if self.depth:
                    (free if self.readers[r] == {OUT} else stacked).add(r)
                continue
            read_last = max(self.readers.get(place, {0}) - {OUT}, default=0)
            written: Value | None = r
            while written is not None and read_last <= self.producers[written]:
                free.add(written)
                written = self._carried_on(written)
        carried = {self.root(v) for v, at in zip(self.scope.outs, self.donated) if v and at}
        return free, stacked - carried

    def _carried_on(self, value: Value) -> Value | None:
        """What a loop carries and returns as `value`, if an operation made it for this loop."""
        i = self.producers[value]
        op = self.scope.ops[i]
        consts, carry = consts_and_carry(op) if op.name == "scan" else (0, 0)
        index = op.outs.index(value)
        start = op.ins[consts + index] if index < carry else None
        r = start and self.root(start)
        return r if r in self.materialized and self.readers[r] == {i} else None

    def written_last(self) -> dict[Value, int]:
        """Results that XLA:GPU copies into donated buffers at the end, in order.

        An argument among them stands for the gathered array that is transposed into its buffer.
        It gathers along a major dim only: a shard is transposed before, and the gathered array
        after. The transpose is fused with what computes the shard, the update of a parameter and
        its optimizer's state, and a fusion that reads an argument in another order than it writes
        is not done in place. (Buffer assignments for an H100.)
        """
        if self.depth or not self.sizes.library:
            return {}
        pairs = zip(self.scope.outs, self.donated, strict=False)
        results = [(out, at) for out, at in pairs if out is not None and at is not None]
        gathered = [(out, at) for out, at in results if _gathers_minor(out, at, self.sizes)]
        fused: set[Value] = set()
        left = [self.root(out) for out, _ in gathered]
        while left:
            v = left.pop()
            if v not in fused and v in self.sources:
                fused.add(v)
                left += (u for u in self.sources[v] if u.size == v.size)
        kept = (self.root(out) for out, at in results if (out, at) not in gathered)
        order = [r for r in kept if r in fused]
        return {v: k for k, v in enumerate([*order, *(at for _, at in gathered)])}

    def not_in_idle_arguments(
        self, lifetimes: list[Lifetime], times: Sequence[int], late: Mapping[Value, int]
    ) -> list[Lifetime]:
        """The lifetimes without those of arrays that XLA:GPU places in donated arguments.

        Their buffers are idle from their last reader until the result is written. It assigns arrays
        by size, each to the smallest buffer where it fits.
        """
        if self.depth or not self.sizes.library:
            return lifetimes
        end = len(self.scope.ops)
        idle: list[tuple[int, int, int, list[Lifetime]]] = []
        for out, place in zip(self.scope.outs, self.donated, strict=False):
            if out is None or place is None or place.host or self.root(out) is place:
                continue
            r = self.root(out)
            late_by = late.get(place, late.get(r))
            if self.sizes.of(out) < self.sizes.of(place):
                late_by = late_by or 0
            written = times[self.producers[r]] if late_by is None else end + late_by
            read = max((times[i] for i in self.readers.get(place, ()) if i != OUT), default=-1)
            if read + 1 < written:
                idle.append((self.sizes.of(place), read, written, []))
        idle.sort(key=lambda slot: slot[0])
        rest = []
        for lifetime in sorted(lifetimes, key=lambda lifetime: -lifetime.bytes):
            for room, read, written, held in idle:
                fits = lifetime.bytes <= room and read < lifetime.first and lifetime.last < written
                apart = all(
                    other.last < lifetime.first or lifetime.last < other.first for other in held
                )
                if fits and apart and not lifetime.value.host:
                    held.append(lifetime)
                    break
            else:
                rest.append(lifetime)
        return rest

    def transposed(self, times: Sequence[int]) -> Iterator[Lifetime]:
        """Arguments that XLA:GPU transposes when the step begins, for gathers inside of loops."""
        if self.depth or not self.sizes.library:
            return
        for value in self.scope.ins:
            loops = [
                i for i in self.readers.get(value, ()) if i != OUT and self.scope.ops[i].bodies
            ]
            views = {v for i in loops for v in self.scope.ops[i].values if self.root(v) is value}
            if any(_gathers_minor_inside(self.scope.ops[i], views, self.sizes) for i in loops):
                yield Lifetime(0, max(times[i] for i in loops), value, self.sizes.of(value))


def _gathers_minor(before: Value, after: Value, sizes: Sizes) -> bool:
    """Whether an array is gathered along another dim than the major one."""
    if sizes.of(after) <= sizes.of(before):
        return False
    shapes = local_shape(before, sizes.mesh), local_shape(after, sizes.mesh)
    dims = [d for d, (n, m) in enumerate(zip(*shapes, strict=True)) if n != m]
    return any(n > 1 for n in shapes[0][: dims[0]])


def _gathers_minor_inside(loop: Op, operands: Set[Value], sizes: Sizes) -> bool:
    """Whether a loop gathers one of these operands, or a slice of it, along a minor dim."""
    for body in loop.bodies:
        parts = {to for v, to in wires(loop, body)[0] if v in operands}
        for op in body.ops if parts else ():
            if op.bodies:
                if _gathers_minor_inside(op, parts, sizes):
                    return True
            elif op.name in _VIEWS_AND_CASTS:
                parts |= {out for v, out in zip(op.ins, op.outs, strict=False) if v in parts}
            elif op.name == CONSTRAINT and op.ins[0] in parts:
                if _gathers_minor(op.ins[0], op.outs[0], sizes):
                    return True
                parts.add(op.outs[0])
    return False
