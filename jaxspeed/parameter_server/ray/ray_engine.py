"""Engine on Ray: the Engine API, with the state in server processes and workers as processes.

This process holds no arrays of the model until `state` is read (for a checkpoint, a sample of text,
a check), which fetches them once per version.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspeed.config import Config, load_config
from jaxspeed.engine.check import CheckReport
from jaxspeed.engine.engine import Batch, Engine
from jaxspeed.errors import JaxspeedError
from jaxspeed.hlo import CompiledReport
from jaxspeed.objective.train_state import TrainState
from jaxspeed.parameter_server.programs import pull_and_push
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.cluster import Cluster, connected, ray_module
from jaxspeed.parameter_server.ray.ownership import OwnedParams
from jaxspeed.parameter_server.ray.ray_schedules import (
    RayAsynchronousSchedule,
    RaySynchronousSchedule,
    run_all,
)
from jaxspeed.parameter_server.ray.resources import RayResources, ray_resources
from jaxspeed.parameter_server.ray.server_functions import combine_scalars
from jaxspeed.parameter_server.ray.server_pool import ServerPool
from jaxspeed.parameter_server.ray.state_transfer import join_state, split_state, variables_of
from jaxspeed.parameter_server.ray.worker_pool import WorkerPool
from jaxspeed.parameter_server.staleness import Rule
from jaxspeed.parameter_server.worker_step import host_parts
from jaxspeed.placement.rows import Row
from jaxspeed.train.program import Metrics, Program, ServerTraffic


@dataclass(frozen=True, kw_only=True)
class RayProgram(Program):
    """The full model's program in this process, with which its state is read and written.

    Its `gradients` and `update` run in other processes, each by its owner.
    """

    workers: int
    servers: tuple[OwnedParams, ...]  # the parameters of each
    rule: Rule

    @property
    def ranks(self) -> int:
        return self.workers

    @property
    def serving(self) -> ServerTraffic:
        def logical(row: Row) -> int:
            return math.prod(row.leaf.shape)

        sends = pull_and_push(self, self.table, logical)
        return ServerTraffic(len(self.servers), self.rule.pace, *sends)

    @property
    def in_this_process(self) -> bool:
        return False

    @property
    def step(self) -> Any:
        raise JaxspeedError(
            "engine.step: on Ray a step is several programs in several processes, so there is no "
            "one function; call engine.train_batch"
        )


class RayEngine(Engine):
    """`train_batch` assigns each worker a part of the global batch."""

    program: RayProgram

    def __init__(
        self, program: RayProgram, resources: RayResources, build: Build, cluster: Cluster
    ) -> None:
        ray = ray_module()
        self._ray, self._resources = ray, resources
        self.ends = contextlib.ExitStack()  # closed with the engine
        # Workers take the first places, which have the accelerators.
        self._workers = WorkerPool(ray, cluster, build)
        self._servers = ServerPool(ray, cluster, build, first=resources.workers)
        self._local_state: TrainState | None = None  # a copy of the current state
        self._open(program, 0)
        self.reset()

    # -- the state ------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """A copy of the servers' state, after everything in flight has arrived.

        Assign to replace it; its step counts on.
        """
        self._call(self._schedule.drain)
        if self._local_state is None:
            program = self.program
            given = self._servers.get_state()
            self._local_state = join_state(program, given, program.servers, self._variables)
        return self._local_state

    @state.setter
    def state(self, state: TrainState) -> None:
        saved, self._variables = split_state(self.program, state, self.program.servers)
        self._workers.discard()
        self._servers.set_state(saved)
        self._begin(int(state.step))

    @property
    def held(self) -> TrainState | None:
        """None: no array of this process has to be freed for another state."""
        return None

    def reset(self) -> None:
        """Create a fresh state in the processes that hold it."""
        seed = self.config.run.seed
        self._variables = variables_of(self.program, seed)
        self._workers.discard()
        self._servers.fresh(seed)
        self._begin(0)

    def _begin(self, version: int) -> None:
        self._reporter.begin_at(version)
        self._local_state = None
        rule = self._resources.rule
        self._workers.begin(self._ray.put(self._variables), self._servers.frozen)
        self._schedule: RaySynchronousSchedule | RayAsynchronousSchedule
        if rule.synchronous:
            self._schedule = RaySynchronousSchedule(self._workers, self._servers, version)
        else:
            self._schedule = RayAsynchronousSchedule(self._workers, self._servers, rule, version)

    @property
    def staleness(self) -> Counter[int]:
        """The number of pushes by staleness, including dropped ones."""
        return Counter(self._schedule.staleness)

    @property
    def processes(self) -> dict[str, list[int]]:
        """The process ids of workers and servers."""
        return {"workers": self._workers.pids(), "servers": self._servers.pids()}

    # -- training -------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """A part of the batch for each worker.

        Synchronous workers make one update, which is done when this returns. Otherwise it returns
        once all parts are assigned and a push was accepted; others are in flight.

        Raises:
          StateLostError: a server died. Assigning `state`, or `load_checkpoint`, starts another.
        """
        parts = self._parts(batch, self.program.batch.train, extra)
        start = time.perf_counter()
        self._local_state = None
        metrics = _as_arrays(self._call(self._schedule.train, parts))
        self._reporter.stepped(metrics, start)
        return metrics

    def eval_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """The loss of a batch in evaluation mode, once every push in flight has arrived."""
        parts = self._parts(batch, None, extra)
        self._call(self._schedule.drain)
        given = (self._workers, "evaluate", parts, self._servers.published)
        done = self._call(run_all, *given)
        scalars, _ = combine_scalars([one.scalars for one in done])
        loss = scalars.total / scalars.weight if scalars.weight > 0 else np.float32(0)
        return _as_arrays({**scalars.metrics, "loss": loss, "weight": scalars.weight})

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the pools; abort what is in flight where it fails."""
        try:
            return function(*args)
        except BaseException:
            self._schedule.abort()
            raise

    def _parts(self, batch: Batch, size: int | None, extra: Any) -> list[Any]:
        """The workers' parts of a batch, by worker."""
        batch = self.program.read_batch(batch, size, extra)
        return host_parts(batch, self.program.ranks)

    def wait(self) -> None:
        """Wait until everything in flight has arrived, and checkpoints are saved."""
        self._call(self._schedule.drain)
        self._reporter.flush()
        self._saver.wait()

    def close(self) -> None:
        """Wait for what is in flight, then end all processes."""
        try:
            self.wait()
            self._saver.close()
        finally:
            self.ends.close()

    # -- inspection -----------------------------------------------------------------------------

    def compiled(self, batch: Batch, extra: Any = None) -> CompiledReport:
        raise JaxspeedError(
            "engine.compiled: on Ray a step is several programs in several processes; "
            'without --engine ray, parallel.data_reduction "parameter_server" shows a worker\'s'
        )

    def check(self, batch: Batch, extra: Any = None, **smaller: Any) -> CheckReport:
        raise JaxspeedError(
            "engine.check: not on Ray, whose processes compute what those of one controller do; "
            "check the same config without --engine ray"
        )


def initialize(
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    address: str | None = None,
    example_batch: Any = None,
    trainable: Any = None,
) -> RayEngine:
    """An engine whose workers and servers are processes on Ray, with a fresh state in them.

    `model`, `loss_fn`, `config`, `optimizer`, `example_batch` and `trainable` as
    `jaxspeed.initialize` takes them; they are pickled for the processes. `mesh.data` is the number
    of workers and `parallel.servers` that of servers.

    Args:
      address: of a Ray cluster; None for the one that this process is connected to, or else a local
        Ray, which ends with the engine.

    Raises:
      ConfigError, ModelError: the config or the model is wrong.
      RunError: the cluster cannot be joined, or lacks resources.
    """
    loaded = load_config({} if config is None else config)
    resources = ray_resources(loaded)
    passed = (model, loss_fn, optimizer, example_batch, trainable)
    build = Build(
        resources.process_config,
        resources.workers,
        resources.servers,
        resources.platform,
        resources.factor,
        *passed,
    )
    with contextlib.ExitStack() as opened:
        opened.enter_context(connected(address))
        program = program_of(loaded, resources, build)
        processes = resources.workers + resources.servers
        cluster = Cluster(processes, accelerated=resources.workers, platform=resources.platform)
        opened.callback(cluster.close)
        engine = RayEngine(program, resources, build, cluster)
        engine.ends = opened.pop_all()
        return engine


def program_of(config: Config, resources: RayResources, build: Build) -> RayProgram:
    """The program of the run in this process."""
    program, servers = build.program(jax.local_devices(backend="cpu")[0])
    given = {name: getattr(program, name) for name in Program.__dataclass_fields__}
    given |= {"config": config, "batch": resources.batch}
    return RayProgram(
        **given, workers=resources.workers, servers=tuple(servers), rule=resources.rule
    )


def _as_arrays(metrics: Mapping[str, Any]) -> Metrics:
    return {name: jnp.asarray(x) for name, x in metrics.items()}
