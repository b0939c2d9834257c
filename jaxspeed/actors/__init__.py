"""The parameter server on Ray: a process for each server and each worker.

What they do is functions of arrays (`pieces`, `share`, `serving`, `working`, `states`); the actors
(`server`, `worker`) are thin over them; `cluster`, `crew` and `servers` know of processes that
start and die; `turns` is whose turn it is, and `engine` the face of it all.
"""

from jaxspeed.actors.cluster import connected
from jaxspeed.actors.engine import RayEngine, RayProgram, initialize
from jaxspeed.actors.staff import staff_of

__all__ = ["RayEngine", "RayProgram", "connected", "initialize", "staff_of"]
