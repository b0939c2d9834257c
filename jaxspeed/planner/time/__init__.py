"""Estimate of a step's time from its traced program.

Collectives (`infer_collectives`) and `host_transfers` on a target's `links` and operations
(`memory.op_cost`) are scheduled (`overlap`) and summed (`roofline`) into a report (`step_time`).
"""

from jaxspeed.planner.time.host_transfers import host_transfers
from jaxspeed.planner.time.roofline import time_in, time_of
from jaxspeed.planner.time.step_time import Time
from jaxspeed.planner.trace.op_cost import device_flops

__all__ = [
    "Time",
    "device_flops",
    "host_transfers",
    "time_in",
    "time_of",
]
