"""The parameter server on Ray: a process for each server and each worker.

What they do is functions of arrays (`ownership`, `server_program`, `server_functions`,
`worker_functions`, `state_transfer`); the actors (`server_actor`, `worker_actor`) are thin over
them; `cluster`, `worker_pool` and `server_pool` know of processes that start and die.
"""

from jaxspeed.parameter_server.ray.cluster import connected
from jaxspeed.parameter_server.ray.ray_engine import RayEngine, RayProgram, initialize
from jaxspeed.parameter_server.ray.resources import staff_of

__all__ = [
    "RayEngine",
    "RayProgram",
    "connected",
    "initialize",
    "staff_of",
]
