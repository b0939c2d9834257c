"""When the operations of a scope run, where a compiler's order is not the program's."""

from jaxspeed.planner.memory.materialization import OUT, READS_ANYTHING, ScopeAnalysis
from jaxspeed.planner.memory.trace_ir import Op, Value


class Ordered(ScopeAnalysis):
    """A scope whose operations run at `times`."""

    def times(self, free: set[Value]) -> list[int]:
        """When operations run: in their order, but what frees more than it takes, at once.

        Compilers order operations so as to need little memory.
        """
        keys: list[tuple[int, ...]] = []
        put_off = self._put_off()
        ready: dict[Value, tuple[int, ...]] = {}
        for i, op in enumerate(self.scope.ops):
            key: tuple[int, ...] = (i,)
            after = max((ready.get(self.root(v), (-1,)) for v in op.values), default=(-1,))
            mine = [out for out in op.outs if out in self.real]
            if mine and not op.bodies:
                arrays = (out for out in mine if out.shape and out not in free)
                taken = sum(map(self.sizes.of, arrays))
                read = {r for v in op.values for r in self.read_by(v) if r in self.real}
                ending = (r for r in read if OUT not in self.readers[r])
                freed = sum(self.sizes.of(r) for r in ending if max(self.readers[r]) == i)
                if freed >= taken:
                    key = (*after, i)
            if i in put_off:
                key = (put_off[i], *key)
            keys.append(key)
            for out in op.outs:
                if out not in self.roots:
                    ready[out] = key if mine else after
        times = [0] * len(keys)
        for time, i in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            times[i] = time
        return times

    def _put_off(self) -> dict[int, int]:
        """Of operations that make gradients: when a GPU's compiler runs them.

        It runs what a backward pass goes on with first, and the gradients of unrolled layers'
        weights when all else is done, so that what they are made of stays alive; but those that
        are scattered over devices at once where layers are made again (compiles for an H100).
        """
        ops = self.scope.ops
        if not self.sizes.library:
            return {}
        last = max((i for i, op in enumerate(ops) if op.backward), default=-1)
        found: dict[int, int] = {}
        free: set[int] = set()  # of them, those that only hand on
        in_turn = any(op.again and self._scatters(op) for op in ops)
        for i in range(last, -1, -1):
            op = ops[i]
            by = set().union(*(self.readers.get(self.root(o), set()) for o in op.outs))
            if not op.backward or op.bodies or (op.again and in_turn):
                continue
            if all(r == OUT or r > last or r in free for r in by):
                found[i] = last
                if op.name not in READS_ANYTHING:
                    free.add(i)
        return found

    def _scatters(self, op: Op) -> bool:
        """Whether devices sum their products, and each keeps a part of the sum."""
        if op.name != "dot_general" or op.ins[0] is None:
            return False
        (summed, _), _ = op.params["dimension_numbers"]
        axes = {axis for dim in summed for axis in self.sizes.cut(op.ins[0])[dim]}
        return any(axes.intersection(cut) for cut in self.sizes.cut(op.outs[0]))
