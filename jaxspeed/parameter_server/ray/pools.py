"""The processes of a run: workers, which are restarted where they fail, and the servers' store."""

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspeed.errors import RunError, StateLostError
from jaxspeed.parameter_server.ray.actors import Build, ServerActor, WorkerActor
from jaxspeed.parameter_server.ray.cluster import SECONDS_TO_START, Cluster
from jaxspeed.parameter_server.ray.failures import died, lost, raised
from jaxspeed.parameter_server.ray.server_state import variables_of
from jaxspeed.parameter_server.schedules import Finished, PushLostError, Task
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.program import Metrics, Program
from jaxspeed.train_state.state import Arrays, TrainState

log = logging.getLogger("jaxspeed")

POLL_SECONDS = 10  # while nothing arrives
MAX_CONSECUTIVE_DEATHS = 3  # of one worker, without a finished task in between


class RayPush(NamedTuple):
    """A push: its loss and weight, the loss scale that was pulled, and references to gradients."""

    losses: Sums
    scale: Any
    grads: Sequence[Any]  # by bucket, then by server


class RayServers:
    """The servers by number. Each holds the only copy of its state."""

    def __init__(
        self, ray: Any, cluster: Cluster, build: Build, reference: Any, program: Program
    ) -> None:
        self._ray, self._cluster, self._build = ray, cluster, reference
        self._program, self._layout = program, build.layout
        self._first = build.resources.workers  # the place of server 0 in the cluster
        self._handles: list[Any] = [None] * build.layout.servers
        self._built: list[Any] = [None] * build.layout.servers
        self.version = 0
        self._local: TrainState | None = None  # a copy of the current state
        self._published: list[Any] = []  # references, by bucket and server
        self._bucket: list[Any] = []  # ... of the last one
        self._next: list[Any] = []  # published by the update in progress, so far
        self._reduced: list[Any] = []  # ... and reduced for it
        self.frozen: list[Any] = []
        self.variables: Arrays = {}
        for server in range(build.layout.servers):
            self._start(server)

    # -- the state ------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """A copy of the servers' state in this process."""
        if self._local is None:
            arrays = self._get([handle.get_state.remote() for handle in self._handles])
            self._local = self._layout.join_state(self._program, arrays, self.variables)
        return self._local

    @state.setter
    def state(self, state: TrainState) -> None:
        saved, self.variables = self._layout.split_state(self._program, state)
        self._restart_dead()
        self._begin(
            [
                handle.set_state.options(num_returns=2).remote(arrays)
                for handle, arrays in zip(self._handles, saved, strict=True)
            ],
            int(state.step),
        )

    def reset(self, seed: int) -> None:
        """Create a fresh state on the servers."""
        self.variables = variables_of(self._program, seed)
        self._restart_dead()
        self._begin([h.fresh.options(num_returns=2).remote(seed) for h in self._handles], 0)

    def _begin(self, references: Sequence[Any], version: int) -> None:
        self._published = [published for published, _ in references]
        self.frozen = [frozen for _, frozen in references]
        self.version, self._local = version, None
        self._next, self._reduced = [], []
        self._get([handle.alive.remote() for handle in self._handles])

    @property
    def held(self) -> TrainState | None:
        """None: no array of this process has to be freed for another state."""
        return None

    def wait(self) -> None:
        """No-op: an update is done when `apply` returns."""

    # -- updates --------------------------------------------------------------------------------

    @property
    def servers(self) -> int:
        return len(self._handles)

    @property
    def buckets(self) -> Sequence[int | None]:
        return range(len(self._layout.buckets)) or (None,)

    def publish(self, bucket: int | None = None) -> list[Any]:
        return list(self._published if bucket is None else self._bucket)

    def losses(self, done: Finished) -> Sums:
        losses: Sums = done.push.losses
        return losses

    def reduce(
        self,
        pushes: Sequence[tuple[Finished, Sums]],
        factor: float = 1.0,
        bucket: int | None = None,
    ) -> tuple[list[Any], int | None]:
        # All were computed under one scale: that of the version, or there is only one push.
        scale, losses = pushes[0][0].push.scale, [losses for _, losses in pushes]
        first = (bucket or 0) * len(self._handles)
        return [
            handle.reduce.remote(
                factor, scale, losses, *(done.push.grads[first + server] for done, _ in pushes)
            )
            for server, handle in enumerate(self._handles)
        ], bucket

    def apply(self, reduced: tuple[list[Any], int | None]) -> Metrics:
        """Update by what was reduced; the metrics once all of it is done.

        No server applies anything unless all of them have reduced their gradients, because `apply`
        takes what all have reduced. So where a push is lost, the state is unchanged. Buckets are
        applied before the later ones have arrived.
        """
        references, bucket = reduced
        self._local = None
        if bucket is None:
            calls = [h.apply.options(num_returns=2).remote(*references) for h in self._handles]
        else:
            self._reduced += references
            last = bucket == len(self._layout.buckets) - 1
            operands = self._reduced if last else []
            calls = [
                h.apply_bucket.options(num_returns=2).remote(last, *operands) for h in self._handles
            ]
        self._bucket = [published for published, _ in calls]
        self._next += self._bucket
        if bucket is not None and not last:
            return {}
        published, self._next, self._reduced = self._next, [], []
        try:
            metrics: list[Metrics] = self._get([pending for _, pending in calls])
        except PushLostError as error:
            if bucket is None:
                raise
            raise StateLostError(f"gradients of some buckets were lost: {error}") from error
        self._published = published
        self.version += 1
        return metrics[0]

    # -- processes ------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """The process ids of the servers, once they have started."""
        pids: list[int] = self._get(self._built, timeout=SECONDS_TO_START)
        return pids

    def _start(self, server: int) -> None:
        self._handles[server] = self._cluster.start(ServerActor, self._first + server)
        self._built[server] = self._handles[server].build.remote(self._build, server)

    def _restart_dead(self) -> None:
        """Start another process in the place of each that died."""
        for server, handle in enumerate(self._handles):
            try:
                self._ray.get(handle.alive.remote(), timeout=SECONDS_TO_START)
            except self._ray.exceptions.RayActorError:
                self._start(server)
        self.pids()

    def _get(self, references: Sequence[Any], timeout: float | None = None) -> Any:
        """The results of these references, one per server.

        Raises:
          StateLostError: a server died.
          PushLostError: its input was lost.
          JaxspeedError: its exception.
        """
        try:
            return self._ray.get(list(references), timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            raise RunError(f"the servers did not answer within {timeout:g} s") from None
        except self._ray.exceptions.RayError as error:
            why = died(self._ray, error)
            if why is not None:
                raise StateLostError(f"a server died ({why})") from error
            if lost(self._ray, error):
                raise PushLostError(str(error)) from error
            raise raised(self._ray, error, "a server") from error


class RayWorkers:
    """Workers by number. `begin` sends what stays the same, `start` sends tasks."""

    def __init__(
        self, ray: Any, cluster: Cluster, build: Build, reference: Any, store: RayServers
    ) -> None:
        self._ray, self._cluster, self._build = ray, cluster, reference
        self._store = store
        self._pushes = build.layout.servers * max(len(build.layout.buckets), 1)
        count = build.resources.workers
        self._constants: tuple[Any, ...] | None = None
        self._deaths = [0] * count
        self._started_at = [0.0] * count
        self._in_flight: dict[Any, tuple[int, Task, Sequence[Any]]] = {}
        self._handles: list[Any] = [None] * count
        self._ready: list[Any] = [None] * count  # references, resolved once callable
        for worker in range(count):
            self._start(worker)

    @property
    def size(self) -> int:
        return len(self._handles)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def pids(self) -> list[int]:
        """The process ids of the workers, once they have started."""
        try:
            pids: list[int] = self._ray.get(self._ready, timeout=SECONDS_TO_START)
        except self._ray.exceptions.GetTimeoutError:
            raise RunError(f"the workers did not start within {SECONDS_TO_START} s") from None
        except self._ray.exceptions.RayError as error:
            raise raised(self._ray, error, "a worker") from error
        return pids

    def begin(self) -> None:
        """Send references to the variables and frozen parameters of the next tasks."""
        self._constants = (self._ray.put(self._store.variables), *self._store.frozen)
        for worker, handle in enumerate(self._handles):
            self._ready[worker] = handle.begin.remote(self._ready[worker], *self._constants)

    def start(self, worker: int, task: Task) -> None:
        handle, ready = self._handles[worker], self._ready[worker]
        arguments = (ready, task.part, task.batch, *task.published)
        if task.train:
            call = handle.gradients.options(num_returns=self._pushes + 1)
            *pushes, losses = call.remote(*arguments)
        else:
            losses, pushes = handle.evaluate.remote(*arguments), []
        self._in_flight[losses] = (worker, task, pushes)

    def next(self) -> Finished:
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
            worker, task, pushes = self._in_flight.pop(done[0])
            try:
                losses, scale = self._ray.get(done[0])
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
            return Finished(worker, task, RayPush(losses, scale, pushes))

    def pull(self, published: Sequence[Any]) -> None:
        """Move a bucket to the workers' machines; an entire version is moved by the next task."""
        if self._pushes > self._store.servers:
            for handle in self._handles:
                handle.pull.remote(*published)

    def metrics(self) -> dict[str, float]:
        return {}

    def discard(self) -> None:
        """Discard what is in flight.

        It runs to its end: an actor whose calls are cancelled may wait for them (ray 2.60).
        """
        self._in_flight.clear()

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
        handle = self._cluster.start(WorkerActor, worker)  # the first places have the accelerators
        self._handles[worker] = handle
        self._started_at[worker] = time.monotonic()
        self._ready[worker] = handle.build.remote(self._build)
