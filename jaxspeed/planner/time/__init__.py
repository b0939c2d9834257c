"""The time of a step, estimated from its traced program: collectives (`infer_collectives`) and
operations (`op_cost`) on a target's `links`, what overlaps (`overlap`), summed in `roofline`.
"""

from jaxspeed.planner.time.roofline import time_in, time_of
from jaxspeed.planner.time.step_time import Exchange, Time

__all__ = [
    "Exchange",
    "Time",
    "time_in",
    "time_of",
]
