"""The worker processes of a run. Failed workers are restarted, and their tasks computed again."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.errors import RunError, StateLostError
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.cluster import SECONDS_TO_START, Cluster
from jaxspeed.parameter_server.ray.failures import died, lost, raised
from jaxspeed.parameter_server.ray.server_functions import LossScalars
from jaxspeed.parameter_server.ray.worker_actor import WorkerActor

log = logging.getLogger("jaxspeed")

POLL_SECONDS = 10  # while nothing arrives
MAX_CONSECUTIVE_DEATHS = 3  # of one worker, without a finished task in between


@dataclass(frozen=True)
class WorkerTask:
    """A call of a worker; its references are stored, so that another worker can repeat it."""

    method: str
    part: int
    batch: Any
    published: Sequence[Any]


@dataclass(frozen=True)
class TaskResult:
    """The result of a task."""

    worker: int
    task: WorkerTask
    scalars: LossScalars
    pushes: Sequence[Any]  # references, one for each server


class WorkerPool:
    """Workers by number. `begin` sends what stays the same, `start` sends tasks."""

    def __init__(self, ray: Any, cluster: Cluster, build: Build, first: int = 0) -> None:
        self._ray, self._cluster = ray, cluster
        self._first = first  # the place of worker 0 in the cluster
        self._build = ray.put(build)
        self._servers = build.servers
        self._constants: tuple[Any, ...] | None = None
        self._deaths = [0] * build.workers
        self._started_at = [0.0] * build.workers
        self._in_flight: dict[Any, tuple[int, WorkerTask, Sequence[Any]]] = {}
        self._handles: list[Any] = [None] * build.workers
        self._ready: list[Any] = [None] * build.workers  # references, resolved once callable
        for worker in range(build.workers):
            self._start(worker)

    @property
    def size(self) -> int:
        return len(self._handles)

    @property
    def in_flight(self) -> int:
        """The number of tasks in flight."""
        return len(self._in_flight)

    def pids(self) -> list[int]:
        """The process ids of the workers, once they have started."""
        try:
            found: list[int] = self._ray.get(self._ready, timeout=SECONDS_TO_START)
        except self._ray.exceptions.GetTimeoutError:
            raise RunError(f"the workers did not start within {SECONDS_TO_START} s") from None
        except self._ray.exceptions.RayError as error:
            raise raised(self._ray, error, "a worker") from error
        return found

    def begin(self, variables: Any, frozen: Sequence[Any]) -> None:
        """Send references to the variables and frozen parameters of the next tasks."""
        self._constants = (variables, *frozen)
        for worker, handle in enumerate(self._handles):
            self._ready[worker] = handle.begin.remote(self._ready[worker], *self._constants)

    def start(self, worker: int, task: WorkerTask) -> None:
        """Send a worker a task."""
        handle, ready = self._handles[worker], self._ready[worker]
        given = (ready, task.part, task.batch, *task.published)
        if task.method == "evaluate":
            scalars, pushes = handle.evaluate.remote(*given), []
        else:
            call = handle.gradients.options(num_returns=self._servers + 1)
            *pushes, scalars = call.remote(*given)
        self._in_flight[scalars] = (worker, task, pushes)

    def next(self) -> TaskResult:
        """The next finished task.

        Raises:
          JaxspeedError: the worker's exception.
          StateLostError: the parameters that it was to use are lost.
          RunError: a worker dies repeatedly, or cannot be restarted.
        """
        while True:
            done, _ = self._ray.wait(list(self._in_flight), timeout=POLL_SECONDS)
            if not done:
                self._check_late_starts()
                continue
            scalars = done[0]
            worker, task, pushes = self._in_flight.pop(scalars)
            try:
                found = self._ray.get(scalars)
            except self._ray.exceptions.RayError as error:
                why = died(self._ray, error)
                if lost(self._ray, error):  # lost with the machine of its server
                    raise StateLostError(
                        "the parameters that a server published are lost"
                    ) from error
                if why is None:
                    raise raised(self._ray, error, f"worker {worker}") from error
                self._replace(worker, why)
                self.start(worker, task)
                continue
            self._deaths[worker] = 0
            return TaskResult(worker, task, found, pushes)

    def _check_late_starts(self) -> None:
        """Raise where a process does not start, instead of waiting forever for its resources."""
        for worker, since in enumerate(self._started_at):
            if time.monotonic() - since < SECONDS_TO_START:
                continue
            started, _ = self._ray.wait([self._ready[worker]], timeout=0)
            if not started:
                raise RunError(
                    f"worker {worker} did not start within {SECONDS_TO_START} s: the cluster may "
                    "have lost the resources for it"
                )

    def discard(self) -> None:
        """Discard what is in flight.

        It runs to its end: an actor whose calls are cancelled may wait for them (ray 2.60).
        """
        self._in_flight.clear()

    def _replace(self, worker: int, why: str) -> None:
        self._deaths[worker] += 1
        if self._deaths[worker] >= MAX_CONSECUTIVE_DEATHS:
            raise RunError(
                f"worker {worker} died {self._deaths[worker]} times without doing any work in "
                f"between; the last time: {why}"
            )
        log.warning("worker %d died (%s); restarting it and repeating its task", worker, why)
        self._start(worker)
        if self._constants is not None:
            ready = self._ready[worker]
            self._ready[worker] = self._handles[worker].begin.remote(ready, *self._constants)

    def _start(self, worker: int) -> None:
        handle = self._cluster.start(WorkerActor, self._first + worker)
        self._handles[worker] = handle
        self._started_at[worker] = time.monotonic()
        self._ready[worker] = handle.build.remote(self._build)
