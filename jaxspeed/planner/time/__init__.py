"""The time of a step, estimated from its traced program: collectives (`infer_collectives`), host
transfers (`host_transfers`) and operations (`op_cost`) on a target's `links`, what overlaps
(`overlap`), summed in `roofline`.
"""

from jaxspeed.planner.time.host_transfers import host_transfers
from jaxspeed.planner.time.op_cost import device_flops
from jaxspeed.planner.time.roofline import time_in, time_of
from jaxspeed.planner.time.step_time import Exchange, Time

__all__ = [
    "Exchange",
    "Time",
    "device_flops",
    "host_transfers",
    "time_in",
    "time_of",
]
