"""Which values of a scope have memory of their own, and who reads them.

- What products, kernels, loops, exchanges and lookups give, and sums over dims.
- What loops keep for a later loop, stacked over their trips.
- Of element-wise results only those that several of these read, unless they are made of a single
  array: a compiler computes the others where they are read, and what products give where their
  result goes on.

A reshape, a transpose or a constraint that changes nothing is another view of its operand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspeed.jaxpr.primitives import (
    ARG_REDUCTIONS,
    COLLECTIVES,
    CONSTRAINT,
    CONTROL,
    CUMULATIVE,
    IDENTITIES,
    KERNELS,
    PRODUCTS,
    RANDOM_BITS,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
)
from jaxspeed.planner.memory.tiles import Sizes
from jaxspeed.planner.memory.trace_ir import ENTER, LEAVE, PLACED, Op, Scope, Value

VIEWS = {
    *RESHAPES, *IDENTITIES, "transpose", "optimization_barrier", "bitcast_convert_type",
    ENTER, LEAVE,
}  # fmt: skip
MOVES = {CONSTRAINT, PLACED, "device_put"}  # views where nothing moves
WHOLE = {
    *PRODUCTS, *REDUCTIONS, *CONTROL, *KERNELS, *CUMULATIVE, *ARG_REDUCTIONS, *COLLECTIVES,
    *RANDOM_BITS, *SCATTERS, "gather", "sort", "top_k", "dynamic_update_slice", "compute_on",
}  # fmt: skip
# What they read may be computed there.
READS_ANYTHING = {*PRODUCTS, *REDUCTIONS, "dynamic_update_slice"}
# Whether a value has memory hangs on what it is made of (before it) and on who reads it (after it):
# found again from what was found, until all know of each other.
ROUNDS = 3
SMALL = 16  # times as large: what is read beside it does not count
OUT = -1  # the reader of what a scope gives


@dataclass
class ScopeAnalysis:
    """One scope, with what `settle` finds of it."""

    scope: Scope
    sizes: Sizes
    given_up: Sequence[Value | None]
    depth: int
    origins: dict[Value, int]  # the size of the largest array that a value is made of
    roots: dict[Value, Value] = field(default_factory=dict)
    readers: dict[Value, set[int]] = field(default_factory=dict)  # by root: operations, or OUT
    makers: dict[Value, int] = field(default_factory=dict)
    forced: set[Value] = field(default_factory=set)
    real: set[Value] = field(default_factory=set)  # roots with memory of their own
    sources: dict[Value, set[Value]] = field(default_factory=dict)  # of element-wise results
    of_exp: set[Value] = field(default_factory=set)  # element-wise results made of an exponential

    def root(self, value: Value) -> Value:
        while value in self.roots:
            value = self.roots[value]
        return value

    def settle(self) -> None:
        """Finds which values have memory of their own, and who reads them."""
        ops = self.scope.ops
        for i, op in enumerate(ops):
            for k, out in enumerate(op.outs):
                source = op.ins[k] if k < len(op.ins) else None
                if source is not None and self._is_view(op, source, out):
                    self.roots[out] = source
                else:
                    self.makers[out] = i
        for _ in range(ROUNDS):
            self.sources = self._sources()
            self.readers, self.forced, self.real = {}, set(), set()
            self._sinks()

    def _is_view(self, op: Op, source: Value, out: Value) -> bool:
        if op.name in MOVES:
            same = self.sizes.cut(source) == self.sizes.cut(out) and source.host == out.host
            return same and source.shape == out.shape
        if op.name == "broadcast_in_dim":
            return source.size == out.size
        return op.name in VIEWS or (op.name == "convert_element_type" and source.dtype == out.dtype)

    def _is_whole(self, op: Op, out: Value) -> bool:
        """Whether its results have memory of their own, whoever reads them."""
        if op.name in MOVES:
            source = op.ins[op.outs.index(out)]
            finer = source is not None and self.sizes.of(out) < self.sizes.of(source)
            return not finer or (source is not None and source.host != out.host)
        scatters = op.name in SCATTERS and not self.sizes.library
        if scatters and op.ins[0] is not None and op.ins[2] is not None:
            # A few numbers among zeros: a comparison of indices, where the result is read.
            into, updates = self.root(op.ins[0]), op.ins[2]
            return not (self._is_spread(into) and SMALL * updates.size <= out.size)
        return op.name in WHOLE

    # -- what is computed where it is read -------------------------------------------------------

    def _sources(self) -> dict[Value, set[Value]]:
        """What an element-wise result is made of, beside what is small against it."""
        found: dict[Value, set[Value]] = {}
        for op in self.scope.ops:
            inside = [self.origins.get(self.root(v), v.size) for v in op.values]
            for out in op.outs:
                if out in self.roots or self._is_whole(op, out):
                    continue
                self.origins[out] = max(inside, default=0)
                of: set[Value] = set()
                for v in op.values:
                    r = self.root(v)
                    if not self._is_spread(r) and SMALL * v.size >= out.size:
                        of |= {r} if r in self.real else found.get(r, {r})
                found[out] = of
                of_same = {self.root(v) for v in op.values if v.size == out.size}
                if op.name == "exp" or of_same & self.of_exp:
                    self.of_exp.add(out)
        return found

    def _is_spread(self, value: Value) -> bool:
        """Made of arrays that are small against it, a mask of positions say, or of nothing.

        A compiler keeps those, and makes it where it is read, also inside of a loop.
        """
        return SMALL * self.origins.get(value, value.size) < value.size

    def _sinks(self) -> None:
        def read(value: Value | None, by: set[int], force: bool = False) -> None:
            if value is not None:
                r = self.root(value)
                self.readers.setdefault(r, set()).update(by)
                if force:
                    self.forced.add(r)

        for v in self.scope.outs:
            read(v, {OUT})
        for i in range(len(self.scope.ops) - 1, -1, -1):
            op = self.scope.ops[i]
            for k, out in enumerate(op.outs):
                if out in self.roots or not self.readers.get(out):
                    continue
                if self._is_whole(op, out):
                    if op.name in PRODUCTS and self._fused_into(out) is not None:
                        for v in op.ins:
                            read(v, self.readers[out])
                        continue
                    self.real.add(out)
                    inputs = [op.ins[k]] if op.name in MOVES else op.ins
                    for v in inputs:
                        made_there = op.bodies and v is not None and self._is_spread(self.root(v))
                        # A product reads its operands again for each block of its result: shares
                        # of a softmax are made once, before it.
                        shares = (
                            op.name in PRODUCTS and v is not None and self.root(v) in self.of_exp
                        )
                        library = self.sizes.library and op.name in PRODUCTS
                        force = shares or library or op.name not in READS_ANYTHING
                        read(v, set() if made_there else {i}, force)
                    continue
                by = self.readers[out]
                several = len(by) > 1 and len(self.sources[out]) > 1
                if out in self.forced or several or OUT in by:
                    self.real.add(out)
                    by = {i}
                for v in op.values:
                    read(v, by)

    def _fused_into(self, product: Value) -> Op | None:
        """The element-wise operation that a product's result goes into, and nowhere else."""
        by = self.readers[product]
        if self.sizes.library or len(by) != 1 or OUT in by or product in self.forced:
            return None
        op = self.scope.ops[next(iter(by))]
        return None if any(self._is_whole(op, out) for out in op.outs) else op

    def read_by(self, value: Value) -> set[Value]:
        """What has memory behind a value that is computed where it is read."""
        r = self.root(value)
        if r in self.real or r not in self.makers:
            return {r}
        of: set[Value] = set()
        for v in self.scope.ops[self.makers[r]].values:
            of |= self.read_by(v)
        return of

    def hand_origins(self, given: Sequence[Value | None], parts: Sequence[Value]) -> None:
        for v, part in zip(given, parts, strict=False):
            if v is not None and self.root(v) in self.origins:
                self.origins[part] = self.origins[self.root(v)]
