"""The fp32 arrays that XLA:TPU stores as bf16: those that only matmuls read.

A TPU's matrix units multiply bf16 numbers. At the default precision an fp32 operand is rounded
first, and XLA:TPU moves the rounding to the operand's producer, through loops, collectives and all
that only moves numbers (seen in its buffer assignment: residuals of a loop that only matmuls read
are stacked as bf16, and weights are gathered as bf16).
"""

from typing import Any

import jax.numpy as jnp

from jaxspeed.jaxpr.primitives import CONSTRAINT, PRODUCTS, SLICES
from jaxspeed.planner.trace.materialization import VIEWS
from jaxspeed.planner.trace.trace_ir import PAIRWISE, Op, Scope, Value, all_ops, flows, reach

_ROUNDING = ("DEFAULT", "BF16_BF16_F32", "None")  # precisions that read 16 bits


def narrow_values(scope: Scope) -> frozenset[Value]:
    """The demoted arrays of a program for a TPU."""
    wide = {v for v in scope.outs if v is not None}
    wide |= set(scope.ins)
    moves = {"scan", "select_n", "broadcast_in_dim", CONSTRAINT, *SLICES, *VIEWS, *PAIRWISE}
    ops = list(all_ops(scope))
    for op in ops:
        if op.name in PRODUCTS:
            if not _rounds(op.params.get("precision")):
                wide.update(op.values)
        elif op.bodies and op.name != "scan":
            wide.update(op.values)
            wide.update(v for b in op.bodies for v in b.outs if v is not None)
        elif op.name not in moves and not _narrows(op):
            wide.update(op.values)
    # Also operands of which a view, a slice or a loop's part is read in fp32.
    wide = reach(wide, ((out, v) for op, v, out in flows(scope) if op.name in moves))
    outputs = (v for op in ops for v in op.outs if v.dtype == jnp.float32)
    inner = (v for op in ops for b in op.bodies for v in b.ins if v.dtype == jnp.float32)
    return frozenset(v for v in (*outputs, *inner) if v not in wide)


def _narrows(op: Op) -> bool:
    """Whether it converts to 16 bits."""
    return op.name == "convert_element_type" and op.outs[0].dtype == jnp.bfloat16


def _rounds(precision: Any) -> bool:
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return all(str(p).rpartition(".")[2] in _ROUNDING for p in precisions)
