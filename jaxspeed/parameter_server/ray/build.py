"""A run on Ray: the numbers of its processes, and what each of them builds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxspeed.config import Batch, Config, load_config
from jaxspeed.config.problems import Problem, config_error
from jaxspeed.engine.jax_setup import enable_compilation_cache
from jaxspeed.errors import ModelError
from jaxspeed.parameter_server.programs import worker_config
from jaxspeed.train import Program, build_program
from jaxspeed.user_models.config_model import resolve_model
from jaxspeed.user_models.pretrained_model import Pretrained

_KEY = "parallel.data_reduction"


@dataclass(frozen=True)
class RayResources:
    """A run on Ray, as its config sets it."""

    workers: int
    servers: int
    devices: int  # of each worker
    platform: str | None  # of the workers; None: JAX's default there
    batch: Batch
    worker_config: dict[str, Any]
    state_config: dict[str, Any]  # of the full state on one device


def ray_resources(config: Config) -> RayResources:
    """The Ray resources of a config.

    Raises:
      ConfigError: lists everything that Ray's workers and servers do not support.
    """
    problems = list(_problems(config))
    if problems:
        raise config_error(problems, "the config, for Ray")
    workers, mesh = _workers(config), config.mesh
    assert workers is not None
    batch = config.batch(workers * mesh.replica)
    return RayResources(
        workers,
        config.parallel.servers,
        mesh.replica * mesh.tensor,
        config.run.devices.partition(":")[0] if config.run.devices else None,
        batch,
        worker_config(config, batch).given,
        worker_config(config, batch, model_axes=False).given,
    )


def _workers(config: Config) -> int | None:
    """mesh.data, or the simulated devices that are not servers, by `replica` x `tensor`."""
    if config.mesh.data != -1:
        return config.mesh.data
    _, _, count = (config.run.devices or "").partition(":")
    left = int(count) - config.parallel.servers if count else None
    return None if left is None else left // (config.mesh.replica * config.mesh.tensor)


def _problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.data_reduction != "parameter_server":
        works = f'On Ray servers sum the gradients: write {_KEY} "parameter_server".'
        yield Problem(_KEY, f'"{parallel.data_reduction}"', works)
    workers = _workers(config)
    if workers is None:
        works = "It sets the number of workers: each is a process with its own devices."
        yield Problem("mesh.data", "nothing", works)
    elif workers < 1:
        found = f"{config.run.devices}, of which {parallel.servers} are servers"
        yield Problem("run.devices", found, "Needs at least one worker.", ("parallel.servers",))
    if parallel.worker_pace:
        works = "It simulates workers of one process; on Ray each has its own pace: remove it."
        yield Problem("parallel.worker_pace", str(parallel.worker_pace), works)
    if config.model is not None and config.model.pretrained is not None:
        works = "Servers on Ray initialize their own pieces: start from a run, with run.init_from."
        yield Problem("model.pretrained", f'"{config.model.pretrained}"', works)
    for key in ("flops_profiler", "comms_logger"):
        if getattr(config, key).enabled:
            works = "They read one compiled step; on Ray a step is several in several processes."
            yield Problem(f"{key}.enabled", "true", works)


@dataclass(frozen=True)
class BuildArguments:
    """The pickled arguments from which a process builds its program."""

    model: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimizer: optax.GradientTransformation | None = None
    example_batch: Any = None
    trainable: Any = None

    def program(self, given: Mapping[str, Any], devices: list[jax.Device]) -> Program:
        config = load_config(given)
        enable_compilation_cache(config.run.compilation_cache)
        model, loss_fn = resolve_model(config, self.model, self.loss_fn)
        if isinstance(model, Pretrained):
            raise ModelError("a pretrained model cannot be trained on Ray; use run.init_from")
        return build_program(
            config,
            model,
            loss_fn,
            optimizer=self.optimizer,
            devices=devices,
            example_batch=self.example_batch,
            trainable=self.trainable,
        )
