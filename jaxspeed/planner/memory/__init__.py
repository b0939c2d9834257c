"""The memory of a step, estimated from its traced program.

The traced step becomes a list of operations (`trace_ir`) and is partitioned as XLA would
(`partitioning`); peak memory follows from liveness (`liveness`) and the device's layout (`tiles`).
The arrays alive at the peak are classified (`classify`) and summed by component (`components`,
`estimate`). `planner.time` reads the same `traced_step`.
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
