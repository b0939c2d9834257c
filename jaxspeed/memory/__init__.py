"""What is kept, what is made again, and what waits in host memory.

State that waits there comes to the device a piece at a time (`streaming`, `separable`, `making`);
`recompute` turns what the config says into what each unit of a program keeps between its passes.
"""

from jaxspeed.memory.accumulating import mean_in_host, zeros_in_host
from jaxspeed.memory.cores import OF_DEVICE, OF_HOST, Cores
from jaxspeed.memory.limits import GPU_LIMIT, pinned_limit
from jaxspeed.memory.making import made_in_groups
from jaxspeed.memory.separable import LeafProgram, Separated, Shared, Slot, separate
from jaxspeed.memory.spaces import in_host, moved_like, on_device, to_device, to_host, waits
from jaxspeed.memory.streaming import Lane, Walk, choose_walk, stream, total

__all__ = [
    "GPU_LIMIT",
    "OF_DEVICE",
    "OF_HOST",
    "Cores",
    "Lane",
    "LeafProgram",
    "Separated",
    "Shared",
    "Slot",
    "Walk",
    "choose_walk",
    "in_host",
    "made_in_groups",
    "mean_in_host",
    "moved_like",
    "on_device",
    "pinned_limit",
    "separate",
    "stream",
    "to_device",
    "to_host",
    "total",
    "waits",
    "zeros_in_host",
]
