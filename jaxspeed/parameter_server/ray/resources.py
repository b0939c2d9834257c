"""A config's demands on Ray: the numbers of workers and servers, and the config of one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxspeed.config import Batch, Config
from jaxspeed.config.problems import Problem, config_error
from jaxspeed.parameter_server.programs import worker_config
from jaxspeed.parameter_server.staleness import Rule

_KEY = "parallel.data_reduction"


@dataclass(frozen=True)
class RayResources:
    """A run on Ray, as its config sets it."""

    workers: int
    servers: int
    platform: str | None  # of the workers; None: JAX's default there
    batch: Batch
    rule: Rule
    factor: float  # that multiplies gradients
    process_config: dict[str, Any]  # the config of one process by itself


def ray_resources(config: Config) -> RayResources:
    """The Ray resources of a config.

    Raises:
      ConfigError: lists everything that Ray's workers and servers do not support.
    """
    problems = list(_problems(config))
    if problems:
        raise config_error(problems, "the config, for Ray")
    workers, parallel = _workers(config), config.parallel
    assert workers is not None
    batch = config.batch(workers)
    rule = Rule(parallel.max_staleness, parallel.on_stale, parallel.staleness_decay)
    platform = config.run.devices.partition(":")[0] if config.run.devices else None
    summed = config.gradient_allreduce_op == "sum" and rule.synchronous
    process_config = worker_config(config, batch.micro, batch.accumulation).given
    factor = workers if summed else 1
    return RayResources(workers, parallel.servers, platform, batch, rule, factor, process_config)


def _workers(config: Config) -> int | None:
    """mesh.data, or the simulated devices that are not servers."""
    if config.mesh.data != -1:
        return config.mesh.data
    _, _, count = (config.run.devices or "").partition(":")
    return int(count) - config.parallel.servers if count else None


def _problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.data_reduction != "parameter_server":
        works = f'On Ray servers sum the gradients: write {_KEY} "parameter_server".'
        yield Problem(_KEY, f'"{parallel.data_reduction}"', works)
    workers = _workers(config)
    if workers is None:
        works = "It sets the number of workers: each is a process with one device."
        yield Problem("mesh.data", "nothing", works)
    elif workers < 1:
        found = f"{config.run.devices}, of which {parallel.servers} are servers"
        yield Problem("run.devices", found, "Needs at least one worker.", ("parallel.servers",))
    if parallel.worker_pace:
        works = "It simulates workers of one process; on Ray each has its own pace: remove it."
        yield Problem("parallel.worker_pace", str(parallel.worker_pace), works)
