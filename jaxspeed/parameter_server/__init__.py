"""A parameter server: what workers compute, what servers do, what is sent between them.

`staleness`, `turns` and `virtual_clock` are its rules, without arrays. `programs` are the compiled
programs of servers and workers on the devices of one controller; a `Service` runs them by `Rounds`
or asynchronously (`OwnPace`). `ray` has the same server as processes on Ray.
"""

from jaxspeed.parameter_server.asynchronous import OwnPace
from jaxspeed.parameter_server.programs import (
    ServedProgram,
    build,
    build_served,
    for_a_worker,
    without_servers,
)
from jaxspeed.parameter_server.rounds import Rounds
from jaxspeed.parameter_server.service import Service
from jaxspeed.parameter_server.staleness import Ledger, Push, Rule
from jaxspeed.parameter_server.traffic import Traffic
from jaxspeed.parameter_server.turns import Arrival, Clock, Start, Turns
from jaxspeed.parameter_server.worker_step import refuse_statistics, wire_of

__all__ = [
    "Arrival",
    "Clock",
    "Ledger",
    "OwnPace",
    "Push",
    "Rounds",
    "Rule",
    "ServedProgram",
    "Service",
    "Start",
    "Traffic",
    "Turns",
    "build",
    "build_served",
    "for_a_worker",
    "refuse_statistics",
    "wire_of",
    "without_servers",
]
