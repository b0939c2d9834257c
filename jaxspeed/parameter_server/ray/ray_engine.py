"""The engine on Ray: the same face; the state is in servers' processes, and workers compute.

This process holds no arrays of the model unless it is asked for them: `state` brings them here (for
a checkpoint, a sample of text, a check), once for each version.
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
from jaxspeed.parameter_server.ray.ownership import Pieces
from jaxspeed.parameter_server.ray.ray_turns import OwnPace, Rounds, everyone
from jaxspeed.parameter_server.ray.resources import Staff, staff_of
from jaxspeed.parameter_server.ray.server_functions import together
from jaxspeed.parameter_server.ray.server_pool import Servers
from jaxspeed.parameter_server.ray.state_transfer import put_together, taken_apart, variables_of
from jaxspeed.parameter_server.ray.worker_pool import Crew
from jaxspeed.parameter_server.staleness import Rule
from jaxspeed.parameter_server.worker_step import host_parts
from jaxspeed.placement.rows import Row
from jaxspeed.train.program import Metrics, Program, ServerTraffic


@dataclass(frozen=True, kw_only=True)
class RayProgram(Program):
    """The whole of a run as a program of this process, with which its state is read and written.

    Its `gradients` and `update` are run elsewhere, each by the process whose part they are.
    """

    workers: int
    servers: tuple[Pieces, ...]  # what each of them owns
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
    """`train_batch` gives each worker its part of a global batch."""

    program: RayProgram

    def __init__(self, program: RayProgram, staff: Staff, build: Build, cluster: Cluster) -> None:
        ray = ray_module()
        self._ray, self._staff = ray, staff
        self.ends = contextlib.ExitStack()  # what ends with the engine
        # Whoever computes takes the first places: those have the accelerators.
        self._crew = Crew(ray, cluster, build)
        self._servers = Servers(ray, cluster, build, first=staff.workers)
        self._here: TrainState | None = None  # what was brought here of the state of now
        self._open(program, 0)
        self.reset()

    # -- the state ------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What the servers hold, once all that is under way has arrived: a copy, in this process.

        Another state may be put here; its step counts on.
        """
        self._asked(self._way.drain)
        if self._here is None:
            program = self.program
            given = self._servers.give()
            self._here = put_together(program, given, program.servers, self._variables)
        return self._here

    @state.setter
    def state(self, state: TrainState) -> None:
        kept, self._variables = taken_apart(self.program, state, self.program.servers)
        self._crew.forget()
        self._servers.take(kept)
        self._begin(int(state.step))

    @property
    def held(self) -> TrainState | None:
        """This process gives up nothing for another state."""
        return None

    def reset(self) -> None:
        """A fresh state, made in the processes that hold it."""
        seed = self.config.run.seed
        self._variables = variables_of(self.program, seed)
        self._crew.forget()
        self._servers.fresh(seed)
        self._begin(0)

    def _begin(self, version: int) -> None:
        self._reporter.begin_at(version)
        self._here = None
        rule = self._staff.rule
        self._crew.begin(self._ray.put(self._variables), self._servers.frozen)
        self._way: Rounds | OwnPace
        if rule.by_rounds:
            self._way = Rounds(self._crew, self._servers, version)
        else:
            self._way = OwnPace(self._crew, self._servers, rule, version)

    @property
    def staleness(self) -> Counter[int]:
        """How many pushes had which staleness, the dropped ones included."""
        return Counter(self._way.staleness)

    @property
    def processes(self) -> dict[str, list[int]]:
        """The ids of the workers' and the servers' processes."""
        return {"workers": self._crew.pids(), "servers": self._servers.pids()}

    # -- training -------------------------------------------------------------------------------

    def train_batch(self, batch: Batch) -> Metrics:
        """A part of the batch for each worker.

        By rounds this is one step, and it is done when this returns. Otherwise it returns once all
        parts are handed out and a push was accepted; others are under way.

        Raises:
          StateLostError: a server died. A state that is put to `state`, or `load_checkpoint`,
            starts another in its place.
        """
        parts = self._parts(batch, self.program.batch.train)
        start = time.perf_counter()
        self._here = None
        metrics = _as_arrays(self._asked(self._way.train, parts))
        self._reporter.stepped(metrics, start)
        return metrics

    def eval_batch(self, batch: Batch) -> Metrics:
        """The loss of a batch in evaluation mode, once every push under way has arrived."""
        parts = self._parts(batch, None)
        self._asked(self._way.drain)
        given = (self._crew, "evaluate", parts, self._servers.published)
        done = self._asked(everyone, *given)
        told, _ = together([one.told for one in done])
        loss = told.total / told.weight if told.weight > 0 else np.float32(0)
        return _as_arrays({**told.metrics, "loss": loss, "weight": told.weight})

    def _asked(self, function: Callable[..., Any], *args: Any) -> Any:
        """What is asked of the processes; where it fails, nothing is under way any more."""
        try:
            return function(*args)
        except BaseException:
            self._way.give_up()
            raise

    def _parts(self, batch: Batch, size: int | None) -> list[Any]:
        """The workers' parts of a batch, in their order."""
        self.program.check_batch(batch, size)
        return host_parts(batch, self.program.ranks)

    def wait(self) -> None:
        """Until all that is under way has arrived, and saves so far are done."""
        self._asked(self._way.drain)
        self._reporter.flush()
        self._saver.wait()

    def close(self) -> None:
        """At the end of a run: ends its processes. What is under way is waited for before."""
        try:
            self.wait()
            self._saver.close()
        finally:
            self.ends.close()

    # -- looking --------------------------------------------------------------------------------

    def compiled(self, batch: Batch) -> CompiledReport:
        raise JaxspeedError(
            "engine.compiled: on Ray a step is several programs in several processes; "
            'without --engine ray, parallel.data_reduction "parameter_server" shows a worker\'s'
        )

    def check(self, batch: Batch, **smaller: Any) -> CheckReport:
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
    """An engine whose workers and servers are processes on Ray; a fresh state is made in them.

    `model`, `loss_fn`, `config`, `optimizer`, `example_batch` and `trainable` as
    `jaxspeed.initialize` takes them; they travel to the processes by pickle. `mesh.data` is how
    many workers there are and `parallel.servers` how many servers.

    Args:
      address: of a Ray cluster; None for the one that this process is connected to, or else one of
        this machine alone, which ends with the engine.

    Raises:
      ConfigError, ModelError: what is wrong with the config or the model.
      RunError: the cluster cannot be joined, or has no room.
    """
    loaded = load_config({} if config is None else config)
    staff = staff_of(loaded)
    passed = (model, loss_fn, optimizer, example_batch, trainable)
    build = Build(staff.alone, staff.workers, staff.servers, staff.platform, staff.factor, *passed)
    with contextlib.ExitStack() as opened:
        opened.enter_context(connected(address))
        program = program_of(loaded, staff, build)
        processes = staff.workers + staff.servers
        cluster = Cluster(processes, accelerated=staff.workers, platform=staff.platform)
        opened.callback(cluster.close)
        engine = RayEngine(program, staff, build, cluster)
        engine.ends = opened.pop_all()
        return engine


def program_of(config: Config, staff: Staff, build: Build) -> RayProgram:
    """The run as this process sees it."""
    program, servers = build.program(jax.local_devices(backend="cpu")[0])
    given = {name: getattr(program, name) for name in Program.__dataclass_fields__}
    given |= {"config": config, "batch": staff.batch}
    return RayProgram(**given, workers=staff.workers, servers=tuple(servers), rule=staff.rule)


def _as_arrays(metrics: Mapping[str, Any]) -> Metrics:
    return {name: jnp.asarray(x) for name, x in metrics.items()}
