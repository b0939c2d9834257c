"""The memory of a step, estimated from its traced program (`planner.trace`).

Peak memory follows from which values have buffers, when operations run (`op_order`), what is
written into arguments (`donation`), what a TPU keeps on the chip (`on_chip`) and the heap (`heap`):
`liveness` joins them. The arrays alive at the peak are summed by component (`components`,
`estimate`).
"""

from jaxspeed.planner.memory.components import Memory
from jaxspeed.planner.memory.estimate import memory_in, memory_of

__all__ = ["Component", "Memory", "memory_in", "memory_of"]
