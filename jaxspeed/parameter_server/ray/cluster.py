"""Connection to Ray, and the placement group of a run's processes.

All resources are reserved before any process starts: a cluster without them is an error instead of
a wait, and a failed process is restarted in its place.
"""

import contextlib
import importlib
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspeed.errors import ConfigError, RunError
from jaxspeed.launch.launch_folder import short_temporary_folder
from jaxspeed.parameter_server.ray.reaper import descendants, ended_with_this_process

log = logging.getLogger("jaxspeed")

SECONDS_TO_ANSWER = 10
SECONDS_TO_RESERVE = 60
SECONDS_TO_START = 300
_ACCELERATORS = {"gpu": "GPU", "cuda": "GPU", "tpu": "TPU"}
# Keeps from standard output what jaxspeed logs once.
_DEATHS = "A worker died or was killed|marked dead|Raylet is terminated"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": _DEATHS,
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def ray_module() -> Any:
    """Import Ray, which an extra installs.

    Raises:
      ConfigError: it is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        ray = importlib.import_module("ray")
        logs: Any = importlib.import_module("ray._private.ray_logging")
    except ImportError:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed: pip install 'jaxspeed[ray]'"
        ) from None
    # Ray read the pattern when it was imported, which may have been before.
    logs.stdout_deduplicator.skip_re = re.compile(os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"])
    return ray


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connect to a Ray cluster within the context; a no-op if this process is connected.

    Best entered before JAX starts its threads: a local Ray is started by forks.

    Args:
      address: as `ray.init` takes it; None starts a local Ray, which ends with the context.

    Raises:
      ConfigError: Ray is not installed.
      RunError: there is no cluster at this address.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield
        return
    if address and address != "auto":
        _check_address(address)
    with contextlib.ExitStack() as opened:
        if address is None:
            opened.enter_context(_closed_to_others())
        before = set(descendants(os.getpid()))
        _init(ray, address)
        if address is None:
            started = set(descendants(os.getpid())) - before
            opened.enter_context(ended_with_this_process(started))
        opened.callback(ray.shutdown)
        yield


def _init(ray: Any, address: str | None) -> None:
    try:
        ray.init(
            address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else {"include_dashboard": False, "_temp_dir": _own_folder()}),
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"--ray-address {address}" if address else "Ray on this machine"
        raise RunError(f"{where}: {str(error).strip().splitlines()[0]}") from error


@contextlib.contextmanager
def _closed_to_others() -> Iterator[None]:
    """A Ray that is started within listens on loopback, and takes a token that others do not have.

    Without Ray's clusters for macOS it does what Ray does there: its own address is loopback.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    raylet: Any = importlib.import_module("ray._raylet")
    required = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in required}, constants.ENABLE_RAY_CLUSTER

    def use(variables: Mapping[str, str | None], clusters: bool) -> None:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        constants.ENABLE_RAY_CLUSTER = clusters
        raylet.Config.initialize("")  # Ray read them when it was imported
        raylet.AuthenticationTokenLoader.instance().reset_cache()

    use(required, False)
    try:
        yield
    finally:
        use(*before)


def _own_folder() -> str:
    """Where a local Ray has its sockets and logs: Ray lets everyone write into its folders.

    Raises:
      RunError: another user has made it.
    """
    parent = Path(short_temporary_folder(), f"jaxspeed-ray-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    status = parent.lstat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise RunError(f"{parent}: not a folder of this user alone (mode 700)")
    return str(parent / "ray")


def _check_address(address: str) -> None:
    """Raise unless something answers: Ray would retry for minutes, and log each try."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"--ray-address: {address}; needs HOST:PORT of the head node, or auto")
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"--ray-address {address}: nothing answers there ({reason})") from None


class Cluster:
    """Reserved resources for a number of processes, each of which may be restarted.

    Args:
      processes: how many.
      accelerated: how many of them, the first ones, use accelerators of the platform.
      devices: the accelerators of each of those.
      whose: what sets their number, for messages.
    """

    def __init__(
        self,
        processes: int,
        accelerated: int = 0,
        platform: str | None = None,
        devices: int = 1,
        whose: str = "mesh.data workers and parallel.servers servers",
    ) -> None:
        self._ray, self._whose = ray_module(), whose
        self._reserved = self._reserve(processes, accelerated, platform, devices)
        self._actors: dict[int, Any] = {}

    # -- resources ------------------------------------------------------------------------------

    def _reserve(self, processes: int, accelerated: int, platform: str | None, devices: int) -> Any:
        group = importlib.import_module("ray.util.placement_group")
        has = self._ray.cluster_resources()
        # The cores of a single machine are shared evenly, however few.
        alone = len(self._ray.nodes()) == 1
        cores = min(1.0, int(1e4 * has.get("CPU", 0) / processes) / 1e4) if alone else 1.0
        kind = _ACCELERATORS.get(platform or "")
        bundles = [
            {"CPU": cores} | ({kind: devices} if kind and i < accelerated else {})
            for i in range(processes)
        ]
        wanted = {"CPU": cores * processes} | ({kind: accelerated * devices} if kind else {})
        lacking = {name: need for name, need in wanted.items() if need > has.get(name, 0)}
        if lacking:
            raise RunError(_lacks(self._of(processes), lacking, has, "has"))
        reserved = group.placement_group(bundles, strategy="SPREAD")
        if not reserved.wait(SECONDS_TO_RESERVE):
            free = self._ray.available_resources()
            group.remove_placement_group(reserved)
            raise RunError(_lacks(self._of(processes), wanted, free, "has free"))
        return reserved

    def _of(self, processes: int) -> str:
        return f"the {processes} processes ({self._whose})"

    # -- processes ------------------------------------------------------------------------------

    def start(self, kind: type, number: int) -> Any:
        """Start a new process in this place, after ending the one that is there."""
        self.end(number)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        at = strategies.PlacementGroupSchedulingStrategy(self._reserved, number)
        bundle = self._reserved.bundle_specs[number]
        rest = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
        actor = (
            self._ray.remote(kind)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=rest or None,
                scheduling_strategy=at,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote()
        )
        self._actors[number] = actor
        return actor

    def end(self, number: int) -> None:
        actor = self._actors.pop(number, None)
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)

    def close(self) -> None:
        """End all processes, and release the resources."""
        if not self._ray.is_initialized():
            return
        for number in list(self._actors):
            self.end(number)
        group = importlib.import_module("ray.util.placement_group")
        with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
            group.remove_placement_group(self._reserved)


def _lacks(processes: str, wanted: dict[str, float], has: dict[str, float], verb: str) -> str:
    needs = " and ".join(f"{need:g} {name}s" for name, need in wanted.items())
    there = " and ".join(f"{has.get(name, 0):g}" for name in wanted)
    return (
        f"Ray: {processes} need {needs}, and the cluster {verb} {there}; ask for fewer, or join a "
        "larger cluster"
    )
