"""Execution order of a scope's operations, where a compiler reorders them to save memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxspeed.planner.trace.materialization import OUT, READS_ANYTHING, ScopeAnalysis, scattered
from jaxspeed.planner.trace.trace_ir import Value


class Lifetime(NamedTuple):
    """A buffer from one position in the order to another, both included."""

    first: int
    last: int
    value: Value
    bytes: int


class OrderedScope(ScopeAnalysis):
    """A scope with the execution order of its operations."""

    def times(self, free: set[Value]) -> list[int]:
        """The position of each operation: program order, but early if it frees more than it takes.

        Compilers order operations so as to need little memory.
        """
        keys: list[tuple[int, ...]] = []
        deferred = self._deferred()
        ready: dict[Value, tuple[int, ...]] = {}
        for i, op in enumerate(self.scope.ops):
            key: tuple[int, ...] = (i,)
            after = max((ready.get(self.root(v), (-1,)) for v in op.values), default=(-1,))
            outs = [out for out in op.outs if out in self.materialized]
            if outs and not op.bodies:
                arrays = (out for out in outs if out.shape and out not in free)
                taken = sum(map(self.sizes.of, arrays))
                early = after
                for last, freed in sorted(self._freed(i, keys)):
                    if taken <= 0:
                        break
                    taken -= freed
                    early = max(early, last)
                if taken <= 0:
                    key = (*early, i)
            if i in deferred:
                key = (deferred[i], *key)
            keys.append(key)
            for out in op.outs:
                if out not in self.roots:
                    ready[out] = key if outs else after
        times = [0] * len(keys)
        for time, i in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            times[i] = time
        return times

    def _freed(
        self, i: int, keys: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """(previous reader, bytes) of each array that an operation is the last to read."""
        read = {r for v in self.scope.ops[i].values for r in self.read_by(v)}
        for r in read & self.materialized:
            by = self.readers[r] - {i}
            if OUT not in by and max(by, default=-1) < i:
                yield max((keys[j] for j in by), default=(-1,)), self.sizes.of(r)

    def _deferred(self) -> dict[int, int]:
        """Operations that compute weight gradients, and when a GPU's compiler runs them.

        It runs the chain of the backward pass first and the weight gradients of unrolled layers
        last, so their operands stay alive. An exception are gradients that are reduce-scattered
        where layers are rematerialized: these run at once (compiles for an H100).
        """
        ops = self.scope.ops
        if not self.sizes.library:
            return self._sums_in_host_memory() if self.sizes.tiled else {}
        last = max((i for i, op in enumerate(ops) if op.backward), default=-1)
        deferred: dict[int, int] = {}
        free: set[int] = set()  # of them, those that only pass values on
        immediate = any(op.rematerialized and scattered(op) for op in ops)
        for i in range(last, -1, -1):
            op = ops[i]
            by = set().union(*(self.readers.get(self.root(o), set()) for o in op.outs))
            if not op.backward or op.bodies or (op.rematerialized and immediate):
                continue
            if all(r == OUT or r > last or r in free for r in by):
                deferred[i] = last
                if op.name not in READS_ANYTHING:
                    free.add(i)
        return deferred

    def _sums_in_host_memory(self) -> dict[int, int]:
        """Loops that only write host memory, as gradients are added up there, and when on a TPU.

        Before the first operation that reads the result.
        """
        sums: dict[int, int] = {}
        for i, op in enumerate(self.scope.ops):
            written = [out for out in op.outs if out.shape]
            if op.bodies and written and all(out.host for out in written):
                by = set().union(*(self.readers.get(self.root(out), ()) for out in written))
                if by and OUT not in by:
                    sums[i] = min(by) - 1
        return sums
