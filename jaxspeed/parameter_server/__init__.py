"""Parameter server: workers compute gradients, servers hold the state and update it.

One worker (`worker.py`), one set of programs of a server (`server.py`), one set of schedules
(`staleness.py`, `schedules.py`) and one engine, with two implementations of workers and store: the
devices of this process (`local.py`), and processes on Ray (`ray/`).
"""

from jaxspeed.parameter_server.programs import batch_of, build
from jaxspeed.parameter_server.schedules import WorkerSchedule
from jaxspeed.parameter_server.staleness import Ledger, Rule
from jaxspeed.parameter_server.virtual_clock import VirtualClock

__all__ = [
    "Ledger",
    "Rule",
    "VirtualClock",
    "WorkerSchedule",
    "batch_of",
    "build",
]
