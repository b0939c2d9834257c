"""The parameter server on Ray: one process per server and per worker.

Their computations are functions of arrays (`ownership`, `server_program`, `server_functions`,
`worker_functions`, `state_transfer`); the actors (`server_actor`, `worker_actor`) are thin
wrappers. `cluster`, `worker_pool` and `server_pool` start processes and handle their failures, and
`ray_schedules` decides who computes next.
"""

from jaxspeed.parameter_server.ray.cluster import connected
from jaxspeed.parameter_server.ray.ray_engine import RayEngine, RayProgram, initialize
from jaxspeed.parameter_server.ray.resources import ray_resources

__all__ = [
    "RayEngine",
    "RayProgram",
    "connected",
    "initialize",
    "ray_resources",
]
