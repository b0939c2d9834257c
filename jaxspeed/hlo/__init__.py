"""Analysis of compiled programs from their HLO text: bytes, FLOPs, collectives, replicated work."""

from jaxspeed.hlo.buffers import largest_buffers, loop_carry_bytes, loop_carry_shapes
from jaxspeed.hlo.collectives import collectives, unknown_loops
from jaxspeed.hlo.compiled_report import CompiledReport, report
from jaxspeed.hlo.cost import cost

__all__ = [
    "CompiledReport",
    "collectives",
    "cost",
    "largest_buffers",
    "loop_carry_bytes",
    "loop_carry_shapes",
    "report",
    "unknown_loops",
]
