"""What a compiled program contains: bytes, FLOPs, collectives, read from its HLO."""

from jaxspeed.hlo.buffers import Buffer, largest_buffers, loop_carry_bytes, loop_carry_shapes
from jaxspeed.hlo.collectives import (
    ACCUMULATION_SCOPE,
    collectives,
    unknown_loops,
)
from jaxspeed.hlo.compiled_report import CompiledReport, report
from jaxspeed.hlo.cost import Cost, cost

__all__ = [
    "ACCUMULATION_SCOPE",
    "Buffer",
    "CompiledReport",
    "Cost",
    "collectives",
    "cost",
    "largest_buffers",
    "loop_carry_bytes",
    "loop_carry_shapes",
    "report",
    "unknown_loops",
]
