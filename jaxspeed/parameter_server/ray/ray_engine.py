"""Engine on Ray: the state in server processes, workers as processes.

This process holds no arrays of the model until `state` is read (for a checkpoint, a sample of text,
a check), which fetches them once per version.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

from jaxspeed.config import AutoValues, Config, load_config
from jaxspeed.engine.check_report import CheckReport
from jaxspeed.engine.engine import Batch
from jaxspeed.errors import JaxspeedError
from jaxspeed.hlo import CompiledReport
from jaxspeed.parameter_server.engine import ServedEngine
from jaxspeed.parameter_server.programs import ServedProgram, gradient_factor, rule_of
from jaxspeed.parameter_server.ray.actors import Build
from jaxspeed.parameter_server.ray.build import BuildArguments, ray_resources
from jaxspeed.parameter_server.ray.cluster import Cluster, connected, ray_module
from jaxspeed.parameter_server.ray.pools import RayServers, RayWorkers
from jaxspeed.parameter_server.ray.server_state import ServerLayout
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import hidden_size_of


@dataclass(frozen=True, kw_only=True)
class RayProgram(ServedProgram):
    """The full model's program in this process, with which its state is read and written.

    Its `gradients` and `update` run in other processes, each by its owner.
    """

    @property
    def in_this_process(self) -> bool:
        return False


class RayEngine(ServedEngine):
    """A parameter server of processes; an update is done when `train_batch` returns."""

    program: RayProgram

    def __init__(self, program: RayProgram, build: Build, cluster: Cluster) -> None:
        ray = ray_module()
        self.ends = contextlib.ExitStack()  # closed with the engine
        reference = ray.put(build)
        store = RayServers(ray, cluster, build, reference, program)
        super().__init__(program, RayWorkers(ray, cluster, build, reference, store), store)
        self.reset()

    @property
    def processes(self) -> dict[str, list[int]]:
        """The process ids of workers and servers."""
        return {"workers": self._workers.pids(), "servers": self._store.pids()}

    def close(self) -> None:
        """Wait for what is in flight, then end all processes."""
        try:
            self.wait()
            self._saver.close()
        finally:
            self._is_closed = True
            self.ends.close()

    def compiled(self, batch: Batch, extra: Any = None, **_: Any) -> CompiledReport:
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
    auto: AutoValues = None,
) -> RayEngine:
    """An engine whose workers and servers are processes on Ray, with a fresh state in them.

    `model`, `loss_fn`, `config`, `optimizer`, `example_batch`, `trainable` and `auto` as
    `jaxspeed.initialize` takes them; all but the last are pickled for the processes. `mesh.data` is
    the number of workers and `parallel.servers` that of servers.

    Args:
      address: of a Ray cluster; None for the one that this process is connected to, or else a local
        Ray, which ends with the engine.

    Raises:
      ConfigError, ModelError: the config or the model is wrong.
      RunError: the cluster cannot be joined, or lacks resources.
    """
    source = {} if config is None else config
    known, passed = hidden_size_of(model), optimizer is not None
    loaded = load_config(source, auto=auto, hidden_size=known, has_optimizer=passed)
    ray_resources(loaded)  # before anything starts
    with contextlib.ExitStack() as opened:
        opened.enter_context(connected(address))
        inputs = BuildArguments(model, loss_fn, optimizer, example_batch, trainable)
        program, build = program_of(loaded, inputs)
        resources = build.resources
        cluster = Cluster(
            resources.workers + resources.servers,
            resources.workers,
            resources.platform,
            resources.devices,
        )
        opened.callback(cluster.close)
        engine = RayEngine(program, build, cluster)
        engine.ends = opened.pop_all()
        return engine


def program_of(config: Config, inputs: BuildArguments) -> tuple[RayProgram, Build]:
    """The program of the run in this process, and what the others build."""
    resources, rule = ray_resources(config), rule_of(config)
    program = inputs.program(resources.state_config, [jax.local_devices(backend="cpu")[0]])
    layout = ServerLayout.of(program, resources.servers, rule.synchronous)
    values = {name: getattr(program, name) for name in Program.__dataclass_fields__}
    values |= {"config": config, "batch": resources.batch}
    workers, servers = resources.workers, resources.servers
    ray_program = RayProgram(**values, workers=workers, servers=servers, rule=rule)
    factor = gradient_factor(config, workers)
    return ray_program, Build(inputs, resources, layout, factor)
