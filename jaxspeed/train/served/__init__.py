"""Training with a parameter server: what workers compute, what servers do, what crosses between.

Workers pull parameters, compute gradients of their parts of a batch and push them; servers own the
state, each its cut, and update it. A `Service` is all of them at work, by `Rounds`, or each worker
at its `OwnPace`.
"""

from jaxspeed.train.served.own_pace import OwnPace
from jaxspeed.train.served.program import ServedProgram, build_served, for_a_worker, without_servers
from jaxspeed.train.served.rounds import Rounds
from jaxspeed.train.served.service import Service
from jaxspeed.train.served.traffic import Traffic
from jaxspeed.train.served.worker import refuse_statistics, wire_of

__all__ = [
    "OwnPace",
    "Rounds",
    "ServedProgram",
    "Service",
    "Traffic",
    "build_served",
    "for_a_worker",
    "refuse_statistics",
    "wire_of",
    "without_servers",
]
