"""The memory of a step, estimated from its traced program.

The traced step becomes a list of operations (`trace_ir`) and is partitioned as XLA would
(`partitioning`). Peak memory follows from which values have buffers (`materialization`), when
operations run (`op_order`), what is written into arguments (`donation`), the device's layout
(`tiles`, `bf16_demotion`, `on_chip`, which needs the seconds of `op_cost`) and the heap (`heap`):
`liveness` joins them. The arrays alive at the peak are classified (`classify`) and summed by
component (`components`, `estimate`). `planner.time` reads the same `traced_step`.
"""

from jaxspeed.planner.memory.components import Component, Memory
from jaxspeed.planner.memory.estimate import memory_in, memory_of
from jaxspeed.planner.memory.traced_step import Step, read_step

__all__ = [
    "Component",
    "Memory",
    "Step",
    "memory_in",
    "memory_of",
    "read_step",
]
