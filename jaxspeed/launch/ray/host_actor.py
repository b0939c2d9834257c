"""The Ray actor around one process of a run: it starts the process where Ray has room for it."""

import queue
import socket
from queue import SimpleQueue
from typing import Any, NamedTuple

from jaxspeed.launch.address import Address
from jaxspeed.launch.agent import decoded_job, encoded
from jaxspeed.launch.launch_folder import LaunchFolder
from jaxspeed.launch.local_group import LocalGroup, started

_SECONDS_A_POLL = 0.2


class ActorPlace(NamedTuple):
    """Where a process runs.

    Attributes:
      host: the name of the host.
      node: Ray's name of it.
      address: where nothing listens, for the processes of other hosts.
      socket: where nothing listens, for those of this one.
    """

    host: str
    node: str
    address: str
    socket: str


class HostActor:
    """One process, whose events are asked for. Ray calls an actor's methods one at a time."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._folder = LaunchFolder()
        self._group: LocalGroup | None = None

    def place(self) -> ActorPlace:
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        here = f"unix:{self._folder.name}/coordinator"
        return ActorPlace(socket.gethostname(), node, str(Address(address, port)), here)

    def start(self, job: str) -> None:
        self._group = started(decoded_job(job), self._events, f"{self._folder.name}/progress")

    def poll(self) -> list[str]:
        """The new events; none if nothing happens for a moment."""
        events = []
        try:
            events.append(encoded(self._events.get(timeout=_SECONDS_A_POLL)))
            while True:
                events.append(encoded(self._events.get_nowait()))
        except queue.Empty:
            return events

    def signal(self, number: int) -> None:
        if self._group is not None:
            self._group.signal(number)
