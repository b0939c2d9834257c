"""What really happens: the compiled program's bytes, flops and collectives; where a NaN began."""

from jaxspeed.observe.buffers import (
    Buffer,
    largest_buffers,
    loop_carry_bytes,
    loop_carry_shapes,
)
from jaxspeed.observe.collectives import (
    ACCUMULATION_SCOPE,
    Collective,
    collectives,
    ring_bytes,
    ring_elements,
    unknown_loops,
)
from jaxspeed.observe.compiled import CompiledReport, report
from jaxspeed.observe.cost import Cost, cost
from jaxspeed.observe.nonfinite import first_nonfinite, nonfinite_flags

__all__ = [
    "ACCUMULATION_SCOPE",
    "Buffer",
    "Collective",
    "CompiledReport",
    "Cost",
    "collectives",
    "cost",
    "first_nonfinite",
    "largest_buffers",
    "loop_carry_bytes",
    "loop_carry_shapes",
    "nonfinite_flags",
    "report",
    "ring_bytes",
    "ring_elements",
    "unknown_loops",
]
