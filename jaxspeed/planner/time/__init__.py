"""Estimate of a step's time from its traced program.

Collectives (`infer_collectives`) on a target's `links` and operations (`op_cost`) are scheduled
(`overlap`) and summed (`roofline`) into a report (`step_time`).
"""

from jaxspeed.planner.time.roofline import time_in, time_of
from jaxspeed.planner.time.step_time import CommunicationGroup, Time

__all__ = [
    "CommunicationGroup",
    "Time",
    "time_in",
    "time_of",
]
