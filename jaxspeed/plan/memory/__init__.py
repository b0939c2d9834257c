"""M, estimated: the traced step is opened (`opened`), cut as the partitioner cuts it (`cuts`), and
walked for what is alive at once (`live`), in a device's layout (`tiles`); what is alive is named by
what it is for (`kinds`), and told by component (`components`, `estimate`). A `step` is traced once;
`jaxspeed.plan.time` reads the same.
"""

from jaxspeed.plan.memory.components import Component, Memory
from jaxspeed.plan.memory.estimate import memory_in, memory_of
from jaxspeed.plan.memory.step import Step, read_step

__all__ = ["Component", "Memory", "Step", "memory_in", "memory_of", "read_step"]
