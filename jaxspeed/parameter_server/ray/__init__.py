"""The parameter server on Ray: one process per server and per worker.

The processes (`actors.py`) run the programs of `worker.py` and `server.py`; each server's state is
that of its pieces (`server_state.py`). `pools.py` starts processes and handles their failures.
"""

from jaxspeed.parameter_server.ray.build import ray_resources
from jaxspeed.parameter_server.ray.cluster import connected
from jaxspeed.parameter_server.ray.ray_engine import RayEngine, RayProgram, initialize

__all__ = [
    "RayEngine",
    "RayProgram",
    "connected",
    "initialize",
    "ray_resources",
]
