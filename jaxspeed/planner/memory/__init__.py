"""The memory of a step, estimated from its traced program.

The traced step becomes a list of operations (`trace_ir`), is partitioned as XLA would
(`partitioning`), and walked for what is alive at once (`liveness`), in a device's layout (`tiles`);
what is alive is classified (`classify`) and summed by component (`components`, `estimate`). A
`traced_step` is made once; `planner.time` reads the same.
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
