"""Kind of each array of a step (gradient, logits, saved activation, ...), from its data flow.

- A **gradient** reaches the next state through element-wise operations, collectives and loops, and
  through no matrix product.
- **Logits** are the product of an activation and a vocabulary's table, where that is wider.
- **Gathered weights** depend on the state alone.
- An **offload buffer** is a copy of an array in host memory.
- A **saved activation** is an output of a loop, or is computed in a forward pass and read in a
  backward pass; any other activation belongs to the **working set**.
"""

from collections.abc import Collection, Iterable

from jaxspeed.jaxpr.primitives import (
    GROUPED_PRODUCTS,
    JOINS,
    PALLAS,
    PRODUCTS,
    REDUCTIONS,
    SCATTERS,
    SLICES,
)
from jaxspeed.planner.trace.trace_ir import (
    LEAVE,
    PAIRWISE,
    Op,
    Scope,
    Value,
    all_ops,
    flows,
    reach,
)

GRADIENTS, LOGITS, WEIGHTS = "gradients", "logits", "gathered weights"
SAVED, WORKING, OFFLOAD = "saved activations", "working set", "offload buffers"
COPIES = "copies of state"
_ENDS = {*PRODUCTS, *GROUPED_PRODUCTS, *PALLAS, "gather"}


class Kinds:
    """Classifier of a step's arrays.

    Args:
      scope: the program.
      state: the inputs that are the state, of any model.
      next_state: the outputs that are the next one, or gradients.
      vocabularies: the inputs with a vocabulary dim.
    """

    def __init__(
        self,
        scope: Scope,
        state: Collection[Value],
        next_state: Iterable[Value | None],
        vocabularies: Iterable[Value],
    ) -> None:
        steps = list(flows(scope))
        pairs = [(v, out) for _, v, out in steps]
        self.of_state = reach(state, pairs)
        self.of_batch = reach({*scope.ins} - {*state}, pairs)
        tables = reach(vocabularies, ((v, out) for op, v, out in steps if _copies(op)))
        self.logits = reach(
            (out for op in all_ops(scope) for out in op.outs if self._is_logits(op, tables)),
            ((v, out) for op, v, out in steps if _passes(op) or out.size >= v.size),
        )
        stacked = reach(
            (out for op in all_ops(scope) if op.name == LEAVE for out in op.outs),
            ((v, out) for op, v, out in steps if _passes(op) or v.size == out.size),
        )
        self.gradients = reach(
            (v for v in next_state if v is not None),
            ((out, v) for op, v, out in steps if _passes(op) or v in _sources(op, out, stacked)),
        )

    def _is_logits(self, op: Op, tables: set[Value]) -> bool:
        sizes = [v.size for v in op.values if v in self.of_batch]
        with_table = op.name in PRODUCTS and not tables.isdisjoint(op.values)
        return with_table and op.outs[0].size > max(sizes, default=op.outs[0].size)

    def of(self, value: Value, op: Op | None, saved: bool) -> str:
        """The kind of an array that `op` made; `saved` from a forward to a backward pass."""
        if op is None:
            return COPIES if value in self.of_state else WORKING
        if op.name == "device_put":
            return OFFLOAD
        if value in self.gradients:
            return GRADIENTS
        if value in self.logits:
            return LOGITS
        if value in self.of_state and value not in self.of_batch:
            return WEIGHTS
        return SAVED if saved or op.bodies else WORKING


def _passes(op: Op) -> bool:
    """Whether it passes arrays on: a loop or cond, or result i is operand i."""
    return bool(op.bodies) or op.name in PAIRWISE


def _copies(op: Op) -> bool:
    """Whether it only copies, casts or slices an array."""
    return _passes(op) or (op.name not in (*_ENDS, *REDUCTIONS) and len(op.values) == 1)


def _sources(op: Op, out: Value, stacked: set[Value]) -> list[Value]:
    """The operands whose sum or part is the result; none of matmuls, kernels and reductions.

    Except for sums over ranks, whose results a region has stacked: a sum over samples looks alike.
    """
    if op.name in _ENDS:
        return []
    if op.name in SCATTERS:
        return [op.ins[0]] if op.ins[0] is not None else []
    if op.name in REDUCTIONS:
        return [
            v for v in op.values if v in stacked and len(v.spec) == len(out.spec) + 1 and v.spec[0]
        ]
    if op.name in (*SLICES, *JOINS):
        return [v for v in op.values if v.shape]
    return [v for v in op.values if v.size == out.size]
