"""What a config asks of Ray: how many workers and servers, and what each process is to build."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxspeed.config import Batch, Config
from jaxspeed.config.problems import Problem, config_error
from jaxspeed.parallel.server import Rule

_KEY = "parallel.data_reduction"
_OF_REDUCTION = (
    "data_reduction",
    "servers",
    "max_staleness",
    "on_stale",
    "staleness_decay",
    "worker_pace",
)
_ONE = {  # what one worker is not cut over
    "pipe": "a worker computes whole gradients by itself",
    "replica": "copies of a worker are workers too: write mesh.data",
    "seq": "each worker is one device",
    "expert": "each worker is one device",
    "tensor": "each worker is one device",
}


@dataclass(frozen=True)
class Staff:
    """A run on Ray, as far as a config tells."""

    workers: int
    servers: int
    platform: str | None  # of the workers; None: what JAX finds there
    batch: Batch
    rule: Rule
    alone: dict[str, Any]  # the config of one process, which knows nothing of the others


def staff_of(config: Config) -> Staff:
    """The staff of a run.

    Raises:
      ConfigError: with everything that Ray's workers and servers cannot do.
    """
    problems = list(_problems(config))
    if problems:
        raise config_error(problems, "the config, for Ray")
    workers, parallel = _workers(config), config.parallel
    assert workers is not None
    batch = config.batch(workers)
    rule = Rule(parallel.max_staleness, parallel.on_stale, parallel.staleness_decay)
    platform = config.run.devices.partition(":")[0] if config.run.devices else None
    alone = _alone(config, batch)
    return Staff(workers, parallel.servers, platform, batch, rule, alone)


def _workers(config: Config) -> int | None:
    """mesh.data, or of simulated devices those that are no servers."""
    if config.mesh.data != -1:
        return config.mesh.data
    _, _, count = (config.run.devices or "").partition(":")
    return int(count) - config.parallel.servers if count else None


def _problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.data_reduction != "parameter_server":
        works = f'On Ray servers add up the gradients: write {_KEY} "parameter_server".'
        yield Problem(_KEY, f'"{parallel.data_reduction}"', works)
    workers = _workers(config)
    if workers is None:
        works = "It says how many workers there are: each is a process with one device."
        yield Problem("mesh.data", "nothing", works)
    elif workers < 1:
        found = f"{config.run.devices}, of which {parallel.servers} are servers"
        yield Problem("run.devices", found, "Needs at least one worker.", ("parallel.servers",))
    for axis, reason in _ONE.items():
        size = getattr(config.mesh, axis)
        if size != 1:
            yield Problem(f"mesh.{axis}", str(size), f"On Ray {reason}: write 1.")
    zero = config.zero_optimization
    for name in ("offload_optimizer", "offload_param"):
        if getattr(zero, name).device == "cpu":
            works = "On Ray servers keep all state in their hosts' memory: remove it."
            yield Problem(f"zero_optimization.{name}.device", '"cpu"', works)
    if parallel.worker_pace:
        works = "It simulates workers of one process; on Ray each has its own pace: remove it."
        yield Problem("parallel.worker_pace", str(parallel.worker_pace), works)


def _alone(config: Config, batch: Batch) -> dict[str, Any]:
    """What one process builds its program from: its part of the batch, on one device.

    ZeRO's stage is left out: the state is cut among the servers in any case.
    """
    given = config.given
    for section in ("mesh", "zero_optimization", "elasticity"):
        given.pop(section, None)
    parallel = given.get("parallel", {})
    given["parallel"] = {k: v for k, v in parallel.items() if k not in _OF_REDUCTION}
    return given | {
        "train_batch_size": batch.micro * batch.accumulation,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
