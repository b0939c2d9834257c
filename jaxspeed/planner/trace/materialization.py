"""The values of a scope that a compiler materializes in memory, and their consumers.

- Outputs of matmuls, kernels, loops, collectives, lookups and reductions.
- Values that a loop stacks over its trips for a later loop.
- Element-wise results only if several of these read them and they depend on several arrays: a
  compiler fuses the others into their consumers, and a matmul's output into the element-wise
  operation that reads it.

A reshape, a transpose or a constraint that changes nothing is a view of its operand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspeed.jaxpr.primitives import (
    ARG_REDUCTIONS,
    COLLECTIVES,
    CONSTRAINT,
    CONTROL,
    CUMULATIVE,
    GROUPED_PRODUCTS,
    IDENTITIES,
    KERNELS,
    PRODUCTS,
    RANDOM_BITS,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
)
from jaxspeed.planner.trace.tiles import Sizes
from jaxspeed.planner.trace.trace_ir import ENTER, LEAVE, PLACED, Op, Scope, Value

VIEWS = {
    *RESHAPES, *IDENTITIES, "transpose", "optimization_barrier", "bitcast_convert_type",
    ENTER, LEAVE,
}  # fmt: skip
MOVES = {CONSTRAINT, PLACED, "device_put"}  # views if sharding and memory stay the same
MATERIALIZED = {
    *PRODUCTS, *GROUPED_PRODUCTS, *REDUCTIONS, *CONTROL, *KERNELS, *CUMULATIVE, *ARG_REDUCTIONS,
    *COLLECTIVES, *RANDOM_BITS, *SCATTERS, "gather", "sort", "top_k", "dynamic_update_slice",
    "compute_on",
}  # fmt: skip
# Their operands may be fused into them.
READS_ANYTHING = {*PRODUCTS, *REDUCTIONS, "dynamic_update_slice"}
# XLA:GPU computes them once for several readers.
COSTLY = {"tanh", "exp", "exp2", "logistic", "erf", "log", "log1p"}
# Materialization depends on a value's producers and on its readers: iterated to a fixed point.
ROUNDS = 3
SMALL = 16  # operands smaller by this factor are neglected
OUT = -1  # the reader of a scope's outputs


def sums_over(op: Op) -> set[str]:
    """The mesh axes over which devices sum a product."""
    if op.name != "dot_general" or op.ins[0] is None:
        return set()
    (summed, _), _ = op.params["dimension_numbers"]
    return {axis for dim in summed for axis in op.ins[0].spec[int(dim)]}


def scattered(op: Op) -> set[str]:
    """The mesh axes over which devices sum a product, and each retains a shard of the sum."""
    axes = sums_over(op)
    return axes & {axis for dim in op.outs[0].spec for axis in dim} if axes else axes


@dataclass
class ScopeAnalysis:
    """One scope, with the results of `analyze`."""

    scope: Scope
    sizes: Sizes
    donated: Sequence[Value | None]
    depth: int
    origins: dict[Value, int]  # size of the largest array on which a value depends
    roots: dict[Value, Value] = field(default_factory=dict)
    readers: dict[Value, set[int]] = field(default_factory=dict)  # by root: operations, or OUT
    producers: dict[Value, int] = field(default_factory=dict)
    forced: set[Value] = field(default_factory=set)
    materialized: set[Value] = field(default_factory=set)  # roots
    sources: dict[Value, list[Value]] = field(default_factory=dict)  # of element-wise results
    of_exp: set[Value] = field(default_factory=set)  # element-wise results of an exponential

    def root(self, value: Value) -> Value:
        while value in self.roots:
            value = self.roots[value]
        return value

    def analyze(self) -> None:
        """Find the materialized values and their readers."""
        ops = self.scope.ops
        for i, op in enumerate(ops):
            for k, out in enumerate(op.outs):
                source = op.ins[k] if k < len(op.ins) else None
                if source is not None and self._is_view(op, source, out):
                    self.roots[out] = source
                else:
                    self.producers[out] = i
        for _ in range(ROUNDS):
            before, self.sources = self.materialized, self._sources()
            self.readers, self.forced, self.materialized = {}, set(), set()
            self._find_readers()
            if self.materialized == before:
                break

    def _is_view(self, op: Op, source: Value, out: Value) -> bool:
        if op.name in MOVES:
            kept = (source.spec, source.host, source.shape)
            return kept == (out.spec, out.host, out.shape)
        if op.name == "broadcast_in_dim":
            return source.size == out.size
        same = self.sizes.dtype(source) == self.sizes.dtype(out)
        return op.name in VIEWS or (op.name == "convert_element_type" and same)

    def _is_materialized(self, op: Op, out: Value) -> bool:
        """Whether the result is materialized independently of its readers."""
        if op.name in MOVES:
            source = op.ins[op.outs.index(out)]
            finer = source is not None and self.sizes.of(out) < self.sizes.of(source)
            return not finer or (source is not None and source.host != out.host)
        scatters = op.name in SCATTERS and not self.sizes.library
        if scatters and op.ins[0] is not None and op.ins[2] is not None:
            # A few numbers among zeros: fused as a comparison of indices into its readers.
            into, updates = self.root(op.ins[0]), op.ins[2]
            return not (self._is_broadcast(into) and SMALL * updates.size <= out.size)
        return op.name in MATERIALIZED

    # -- fusion into consumers --------------------------------------------------------------------

    def _sources(self) -> dict[Value, list[Value]]:
        """The sources of each element-wise result, in its order, without relatively small ones."""
        sources: dict[Value, list[Value]] = {}
        for i, op in enumerate(self.scope.ops):
            inside = [self.origins.get(self.root(v), v.size) for v in op.values]
            for out in op.outs:
                if out in self.roots or self._is_materialized(op, out):
                    continue
                self.origins[out] = max(inside, default=0)
                of: list[Value] = []
                by = {i, *self.readers.get(out, ())}
                for v in op.values:
                    r = self.root(v)
                    if not self._is_broadcast(r) and SMALL * v.size >= out.size:
                        read = r in self.materialized and not by.isdisjoint(self.readers[r])
                        of += [r] if read else sources.get(r, [r])
                sources[out] = [*dict.fromkeys(of)]
                of_same = {self.root(v) for v in op.values if v.size == out.size}
                if of_same & self.of_exp or self._is_costly(op):
                    self.of_exp.add(out)
        return sources

    def _is_costly(self, op: Op) -> bool:
        """Whether a matmul's operand is computed once, not once per block of the result.

        XLA:TPU fuses an exponential into matmuls, as in a loss's gradient, but no division of
        arrays, as in a softmax.
        """
        if self.sizes.library:
            return op.name == "exp"
        return op.name == "div" and op.ins[1] is not None and op.ins[1].size > 1

    def _is_broadcast(self, value: Value) -> bool:
        """Whether it depends only on much smaller arrays (as a mask of positions does) or on none.

        A compiler stores those, and recomputes it where it is read, inside of a loop too.
        """
        return SMALL * self.origins.get(value, value.size) < value.size

    def _find_readers(self) -> None:
        def read(value: Value | None, by: set[int], force: bool = False) -> None:
            if value is not None:
                r = self.root(value)
                self.readers.setdefault(r, set()).update(by)
                if force:
                    self.forced.add(r)
                    forcing.setdefault(r, set()).update(by)

        forcing: dict[Value, set[int]] = {}  # the readers that need it in memory
        for v in self.scope.outs:
            read(v, {OUT})
        for i in range(len(self.scope.ops) - 1, -1, -1):
            op = self.scope.ops[i]
            if op.name == "optimization_barrier":
                self.forced.update(self.root(v) for v in op.values)
            for k, out in enumerate(op.outs):
                if out in self.roots or not self.readers.get(out):
                    continue
                if self._is_materialized(op, out):
                    if op.name in PRODUCTS and self._fused_into(out) is not None:
                        for v in op.ins:
                            read(
                                v, self.readers[out], v is not None and self.root(v) in self.of_exp
                            )
                        continue
                    self.materialized.add(out)
                    inputs = [op.ins[k]] if op.name in MOVES else op.ins
                    for v in inputs:
                        recomputed = (
                            op.bodies and v is not None and self._is_broadcast(self.root(v))
                        )
                        # A matmul reads its operands once per block of its result, so softmax
                        # probabilities are materialized before it.
                        shares = (
                            op.name in PRODUCTS and v is not None and self.root(v) in self.of_exp
                        )
                        library = self.sizes.library and op.name in PRODUCTS
                        force = shares or library or op.name not in READS_ANYTHING
                        read(v, set() if recomputed else {i}, force)
                    continue
                by = self.readers[out]
                costly = self.sizes.library and op.name in COSTLY
                several = len(by) > 1 and (costly or len(self.sources[out]) > 1)
                if out in self.forced or several or OUT in by:
                    self.materialized.add(out)
                    must = by if OUT in by else self._needed_by(out, by, forcing.get(out, by))
                    self.readers[out], by = must, {i} | (by - must)
                for v in op.values:
                    read(v, by)

    def _needed_by(self, value: Value, by: set[int], forcing: set[int]) -> set[int]:
        """The readers for which an element-wise result is in memory.

        On TPUs the others compute it again, if from one array: a lookup of a loss needs logits that
        are capped, an exponential caps them again.
        """
        # A loop that computes it again from a small array forces nothing.
        again = not self.sizes.library and len(self.sources[value]) == 1
        return (again and forcing) or by

    def _fused_into(self, product: Value) -> Op | None:
        """The element-wise operation that is the only reader of a matmul's result."""
        by = self.readers[product]
        if self.sizes.library or len(by) != 1 or OUT in by or product in self.forced:
            return None
        if sums_over(self.scope.ops[self.producers[product]]):
            return None
        op = self.scope.ops[next(iter(by))]
        return None if any(self._is_materialized(op, out) for out in op.outs) else op

    def read_by(self, value: Value) -> set[Value]:
        """The materialized values on which a fused value depends."""
        r = self.root(value)
        if r in self.materialized or r not in self.producers:
            return {r}
        of: set[Value] = set()
        for v in self.scope.ops[self.producers[r]].values:
            of |= self.read_by(v)
        return of

    def pass_origins(self, operands: Sequence[Value | None], inner: Sequence[Value]) -> None:
        for v, to in zip(operands, inner, strict=False):
            if v is not None and self.root(v) in self.origins:
                self.origins[to] = self.origins[self.root(v)]
