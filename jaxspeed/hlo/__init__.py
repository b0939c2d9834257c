"""Analysis of compiled programs from their HLO text: bytes, FLOPs, collectives, replicated work."""

from jaxspeed.hlo.buffers import Buffer, largest_buffers, loop_carry_bytes, loop_carry_shapes
from jaxspeed.hlo.collectives import (
    ACCUMULATION_SCOPE,
    Collective,
    collectives,
    ring_bytes,
    ring_elements,
    unknown_loops,
)
from jaxspeed.hlo.compiled_report import CompiledReport, report
from jaxspeed.hlo.cost import Cost, cost

__all__ = [
    "ACCUMULATION_SCOPE",
    "Buffer",
    "Collective",
    "CompiledReport",
    "Cost",
    "collectives",
    "cost",
    "largest_buffers",
    "loop_carry_bytes",
    "loop_carry_shapes",
    "report",
    "ring_bytes",
    "ring_elements",
    "unknown_loops",
]
