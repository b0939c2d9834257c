"""Parameter server: workers compute gradients, servers hold the state and update it.

`staleness` and `worker_schedule` are its rules, without arrays. `programs` has the compiled
programs of servers and workers on the devices of one controller; a `ParameterServer` runs them
synchronously (`SynchronousSchedule`) or with bounded staleness (`AsynchronousSchedule`). `ray` has
the same with one process per server and worker.
"""

from jaxspeed.parameter_server.asynchronous import AsynchronousSchedule
from jaxspeed.parameter_server.programs import (
    ServedProgram,
    build,
    build_served,
    without_servers,
    worker_config,
)
from jaxspeed.parameter_server.server import ParameterServer
from jaxspeed.parameter_server.staleness import Ledger, Push, Rule
from jaxspeed.parameter_server.synchronous import SynchronousSchedule
from jaxspeed.parameter_server.traffic import Traffic
from jaxspeed.parameter_server.worker_schedule import Arrival, Start, VirtualClock, WorkerSchedule
from jaxspeed.parameter_server.worker_step import refuse_statistics, wire_of

__all__ = [
    "Arrival",
    "AsynchronousSchedule",
    "Ledger",
    "ParameterServer",
    "Push",
    "Rule",
    "ServedProgram",
    "Start",
    "SynchronousSchedule",
    "Traffic",
    "VirtualClock",
    "WorkerSchedule",
    "build",
    "build_served",
    "refuse_statistics",
    "wire_of",
    "without_servers",
    "worker_config",
]
