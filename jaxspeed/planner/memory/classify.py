"""Kind of each array of a step (gradient, logits, saved activation, ...), from its data flow.

- A **gradient** reaches the next state through element-wise operations, collectives and loops, and
  through no matrix product.
- **Logits** are the product of an activation and a vocabulary's table, where that is wider.
- **Gathered weights** depend on the state alone.
- An **offload buffer** is a copy of an array in host memory.
- A **saved activation** is an output of a loop, or is computed in a forward pass and read in a
  backward pass; any other activation belongs to the **working set**.
"""

from collections.abc import Callable, Iterable

from jaxspeed.jaxpr.primitives import JOINS, PRODUCTS, REDUCTIONS, SCATTERS, SLICES
from jaxspeed.planner.memory.liveness import LiveArray
from jaxspeed.planner.memory.trace_ir import PAIRWISE, Op, Scope, Value, wires

GRADIENTS, LOGITS, WEIGHTS = "gradients", "logits", "gathered weights"
SAVED, WORKING, OFFLOAD = "saved activations", "working set", "offload buffers"
COPIES = "copies of state"
KINDS = (GRADIENTS, SAVED, WORKING, LOGITS, WEIGHTS, OFFLOAD, COPIES)
Rule = Callable[[Op], bool]
_ENDS = {*PRODUCTS, "pallas_call", "gather"}


class Kinds:
    """Classifier of a step's arrays.

    Args:
      scope: the step.
      state: number of inputs that are the state, and of outputs that are the next one.
      vocabularies: the inputs with a vocabulary dim.
    """

    def __init__(self, scope: Scope, state: int, vocabularies: Iterable[Value]) -> None:
        self.of_batch = set(scope.ins[state:])
        _reach(scope, self.of_batch, lambda op: any(v in self.of_batch for v in op.values))
        self.of_state = set(scope.ins[:state])
        _reach(scope, self.of_state, lambda op: any(v in self.of_state for v in op.values))
        tables = set(vocabularies)
        ends = {*_ENDS, *REDUCTIONS}
        _reach(scope, tables, lambda op: op.name not in ends and _table(op, tables))
        self.logits: set[Value] = set()
        _reach(scope, self.logits, self._makes_logits(tables))
        self.gradients = {v for v in scope.outs[:state] if v is not None}
        _reach_back(scope, self.gradients)

    def _makes_logits(self, tables: set[Value]) -> Rule:
        def rule(op: Op) -> bool:
            sizes = [v.size for v in op.values if v in self.of_batch]
            if op.name in PRODUCTS:
                with_table = any(v in tables for v in op.values)
                return with_table and op.outs[0].size > max(sizes, default=op.outs[0].size)
            wide = [v.size for v in op.values if v in self.logits]
            return bool(wide) and not op.bodies and op.outs[0].size >= max(wide)

        return rule

    def of(self, array: LiveArray) -> str:
        value, op = array.value, array.op
        if op is None:
            return COPIES
        if op.name == "device_put":
            return OFFLOAD
        if value in self.gradients:
            return GRADIENTS
        if value in self.logits:
            return LOGITS
        if value in self.of_state and value not in self.of_batch:
            return WEIGHTS
        return SAVED if array.saved or op.bodies else WORKING


def _table(op: Op, tables: set[Value]) -> bool:
    """Whether the operation only copies, casts or slices a table."""
    return any(v in tables for v in op.values) and len(op.values) == 1


def _reach(scope: Scope, found: set[Value], rule: Rule) -> None:
    """Add the outputs of operations that match the rule, through loops too."""
    for op in scope.ops:
        if op.name in PAIRWISE:
            found.update(out for v, out in zip(op.ins, op.outs, strict=True) if v in found)
            continue
        if not op.bodies:
            if rule(op):
                found.update(op.outs)
            continue
        around = [wires(op, body) for body in op.bodies]
        for _ in range(2):  # twice, for loop carries
            for body, (given, _outs, carried) in zip(op.bodies, around, strict=True):
                found |= {b for v, b in given if v in found}
                found |= {b for v, b in carried if v in found}
                _reach(body, found, rule)
        for _given, outs, _carried in around:
            found |= {o for v, o in outs if v in found}


def _reach_back(scope: Scope, found: set[Value]) -> None:
    """Add the operands of found values, except those of matmuls, kernels and reductions."""
    for op in reversed(scope.ops):
        if not op.bodies:
            found.update(v for out in op.outs if out in found for v in _sources(op, out))
            continue
        around = [wires(op, body) for body in op.bodies]
        for _ in range(2):
            for body, (_given, outs, carried) in zip(op.bodies, around, strict=True):
                found |= {v for v, o in outs if o in found and v}
                found |= {v for v, b in carried if b in found and v}
                _reach_back(body, found)
        for given, _outs, _carried in around:
            found |= {v for v, b in given if b in found and v}


def _sources(op: Op, out: Value) -> list[Value]:
    if op.name in _ENDS:
        return []
    if op.name in SCATTERS:
        return [op.ins[0]] if op.ins[0] is not None else []
    if op.name in PAIRWISE:
        source = op.ins[op.outs.index(out)]
        return [source] if source is not None else []
    if op.name in REDUCTIONS:  # only over ranks, whose shards a region has stacked
        return [v for v in op.values if v.spec and len(v.spec) == len(out.spec) + 1 and v.spec[0]]
    if op.name in (*SLICES, *JOINS):
        return [v for v in op.values if v.shape]
    return [v for v in op.values if v.size == out.size]
