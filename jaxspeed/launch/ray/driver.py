"""`python -m jaxspeed.launch.ray.driver JOB`: the driver of a Ray job, which supervises a run.

JOB is JSON, percent-encoded, since it passes through a shell.

Ray reserves the resources of all processes before one starts. Where Ray does not reach a process
any more, that counts as its end, and the others are ended.
"""

import json
import os
import secrets
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import unquote

from jaxspeed.errors import JaxspeedError
from jaxspeed.launch.agent import decoded, decoded_job, encoded_job
from jaxspeed.launch.local_group import Ended, HostJob, Output
from jaxspeed.launch.output import Display
from jaxspeed.launch.ray.host_actor import HostActor
from jaxspeed.launch.remote_group import LOST
from jaxspeed.launch.supervisor import Restarts, supervise
from jaxspeed.parameter_server.ray.cluster import Cluster, connected, ray_module

_SECONDS_TO_START = 300


class ActorGroup:
    """The processes of a run, each in an actor, whose events arrive in a queue."""

    def __init__(self, job: HostJob, cluster: Cluster, events: "SimpleQueue[Any]") -> None:
        self._ray, self._cluster, self._events = ray_module(), cluster, events
        self._actors = [cluster.start(HostActor, rank) for rank in range(job.count)]
        asked = [actor.place.remote() for actor in self._actors]
        places = self._ray.get(asked, timeout=_SECONDS_TO_START)
        self.hosts = [place.host for place in places]
        is_one = len({place.node for place in places}) == 1
        coordinator = places[0].socket if is_one else places[0].address
        job = replace(job, coordinator=coordinator, token=secrets.token_hex(32))
        for rank, actor in enumerate(self._actors):
            mine = replace(job, first=rank)
            actor.start.remote(encoded_job(mine))
            threading.Thread(target=self._poll, args=(rank, actor), daemon=True).start()

    def _poll(self, rank: int, actor: Any) -> None:
        while True:
            try:
                events = [decoded(text) for text in self._ray.get(actor.poll.remote())]
            except Exception as error:  # Ray's own, of many kinds
                reason = str(error).strip().splitlines()[0]
                self._events.put(Output(rank, f"Ray: {reason}", True))
                events = [Ended(rank, LOST, time.time())]
            for event in events:
                self._events.put(event)
            if any(isinstance(event, Ended) for event in events):
                return

    def signal(self, number: int) -> None:
        for actor in self._actors:
            actor.signal.remote(int(number))

    def resize(self) -> None:
        pass  # no process has a terminal

    def close(self) -> None:
        """End the actors; their processes end with them."""
        for rank in range(len(self._actors)):
            self._cluster.end(rank)


def drive(job: HostJob, restarts: Restarts, logs: str | None) -> int:
    """Run the job's processes on Ray; the exit code."""
    display = Display(Path(logs) if logs else None)
    hosts: list[str] = []
    with connected("auto" if "RAY_ADDRESS" in os.environ else None):
        devices = job.devices or 0
        cluster = Cluster(
            job.count, job.count if devices else 0, "gpu", devices, whose="--processes"
        )

        def start(events: Any, progress: str) -> ActorGroup:
            group = ActorGroup(job, cluster, events)
            hosts[:] = group.hosts
            return group

        try:
            return supervise(start, job.count, display, restarts, lambda rank: hosts[rank])
        finally:
            display.close()
            cluster.close()


def main() -> int:
    arguments = json.loads(unquote(sys.argv[1]))
    try:
        return drive(
            decoded_job(arguments["job"]), Restarts(**arguments["restarts"]), arguments["logs"]
        )
    except JaxspeedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
