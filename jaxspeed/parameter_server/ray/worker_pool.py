"""The workers of a run. Whoever dies is replaced, and what it had in flight is computed again."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.errors import RunError, StateLostError
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.cluster import SECONDS_TO_START, Cluster
from jaxspeed.parameter_server.ray.failures import died, lost, raised
from jaxspeed.parameter_server.ray.server_functions import Told
from jaxspeed.parameter_server.ray.worker_actor import Worker

log = logging.getLogger("jaxspeed")

LOOK_EVERY = 10  # seconds, where nothing arrives
DEATHS_IN_A_ROW = 3  # of one worker, that do no work between them


@dataclass(frozen=True)
class Task:
    """A call of a worker; the references are kept, so that another worker can be called so."""

    method: str
    part: int
    batch: Any
    published: Sequence[Any]


@dataclass(frozen=True)
class Done:
    """What came of a task."""

    worker: int
    task: Task
    told: Told
    pushes: Sequence[Any]  # references, one for each server


class Crew:
    """Workers by number. They are told what stays the same by `begin`, and tasks by `start`."""

    def __init__(self, ray: Any, cluster: Cluster, build: Build, first: int = 0) -> None:
        self._ray, self._cluster = ray, cluster
        self._first = first  # the place of worker 0 in the cluster
        self._build = ray.put(build)
        self._servers = build.servers
        self._same: tuple[Any, ...] | None = None
        self._deaths = [0] * build.workers
        self._called_in = [0.0] * build.workers
        self._under_way: dict[Any, tuple[int, Task, Sequence[Any]]] = {}
        self._handles: list[Any] = [None] * build.workers
        self._ready: list[Any] = [None] * build.workers  # what each answers once it can be called
        for worker in range(build.workers):
            self._call_in(worker)

    @property
    def size(self) -> int:
        return len(self._handles)

    @property
    def under_way(self) -> int:
        """How many tasks are."""
        return len(self._under_way)

    def pids(self) -> list[int]:
        """The processes of the workers, once they are there."""
        try:
            found: list[int] = self._ray.get(self._ready, timeout=SECONDS_TO_START)
        except self._ray.exceptions.GetTimeoutError:
            raise RunError(f"the workers did not start within {SECONDS_TO_START} s") from None
        except self._ray.exceptions.RayError as error:
            raise raised(self._ray, error, "a worker") from error
        return found

    def begin(self, variables: Any, frozen: Sequence[Any]) -> None:
        """What stays the same from now on: references."""
        self._same = (variables, *frozen)
        for worker, handle in enumerate(self._handles):
            self._ready[worker] = handle.begin.remote(self._ready[worker], *self._same)

    def start(self, worker: int, task: Task) -> None:
        """Give a worker something to do."""
        handle, ready = self._handles[worker], self._ready[worker]
        given = (ready, task.part, task.batch, *task.published)
        if task.method == "evaluate":
            told, pushes = handle.evaluate.remote(*given), []
        else:
            call = handle.gradients.options(num_returns=self._servers + 1)
            *pushes, told = call.remote(*given)
        self._under_way[told] = (worker, task, pushes)

    def next(self) -> Done:
        """The next task that is done, in the order in which they are.

          Raises:
            JaxspeedError: what the worker raised.
            StateLostError: what it was to compute on is gone.
        RunError: a worker dies again and again, or cannot be started again.
        """
        while True:
            done, _ = self._ray.wait(list(self._under_way), timeout=LOOK_EVERY)
            if not done:
                self._look_for_late_starts()
                continue
            told = done[0]
            worker, task, pushes = self._under_way.pop(told)
            try:
                found = self._ray.get(told)
            except self._ray.exceptions.RayError as error:
                why = died(self._ray, error)
                if lost(self._ray, error):  # with the machine of the server that published it
                    raise StateLostError("what a server published is gone") from error
                if why is None:
                    raise raised(self._ray, error, f"worker {worker}") from error
                self._replace(worker, why)
                self.start(worker, task)
                continue
            self._deaths[worker] = 0
            return Done(worker, task, found, pushes)

    def _look_for_late_starts(self) -> None:
        """Rather than wait for ever for a process that has no room."""
        for worker, since in enumerate(self._called_in):
            if time.monotonic() - since < SECONDS_TO_START:
                continue
            started, _ = self._ray.wait([self._ready[worker]], timeout=0)
            if not started:
                raise RunError(
                    f"worker {worker} did not start within {SECONDS_TO_START} s: the cluster may "
                    "have lost the room for it"
                )

    def forget(self) -> None:
        """What is under way is of no use any more.

        It runs to its end: an actor whose calls are cancelled may wait for them (ray 2.60).
        """
        self._under_way.clear()

    def _replace(self, worker: int, why: str) -> None:
        self._deaths[worker] += 1
        if self._deaths[worker] >= DEATHS_IN_A_ROW:
            raise RunError(
                f"worker {worker} died {self._deaths[worker]} times without doing any work in "
                f"between; the last time: {why}"
            )
        log.warning("worker %d died (%s); another takes its place and its work", worker, why)
        self._call_in(worker)
        if self._same is not None:
            ready = self._ready[worker]
            self._ready[worker] = self._handles[worker].begin.remote(ready, *self._same)

    def _call_in(self, worker: int) -> None:
        handle = self._cluster.start(Worker, self._first + worker)
        self._handles[worker] = handle
        self._called_in[worker] = time.monotonic()
        self._ready[worker] = handle.build.remote(self._build)
