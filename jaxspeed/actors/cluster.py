"""Ray, and room on it for the processes of a run.

The room is taken as a whole before any process starts, so that a cluster without it is an error and
no wait, and so that a process that died is followed by another in its place.
"""

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from jaxspeed.errors import ConfigError, RunError

log = logging.getLogger("jaxspeed")

SECONDS_FOR_ROOM = 60
SECONDS_TO_START = 300
_ACCELERATORS = {"gpu": "GPU", "cuda": "GPU", "tpu": "TPU"}
# What Ray prints to the standard output of whoever uses it, in its own words; here it is logged.
_SAID_BY_OURSELVES = "A worker died or was killed|is pending|Actor .* died"


def ray_module() -> Any:
    """Ray, which an extra installs.

    Raises:
      ConfigError: it is not installed.
    """
    if "ray" not in sys.modules:  # both are read when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _SAID_BY_OURSELVES)
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed: pip install 'jaxspeed[ray]'"
        ) from None


class Cluster:
    """Room for so many processes, by number; each may be started again.

    Args:
      address: of a cluster, as `ray.init` takes it; None: the one that this process is connected
        to, else a Ray of this machine alone, which ends with `close`.
      processes: how many.
      accelerated: how many of them, the first ones, use an accelerator of the platform.
      store_bytes: how much a Ray of this machine may keep between processes.
    """

    def __init__(
        self,
        address: str | None,
        processes: int,
        *,
        accelerated: int = 0,
        platform: str | None = None,
        store_bytes: int | None = None,
    ) -> None:
        self._ray = ray_module()
        self._started = False
        if not self._ray.is_initialized():
            self._connect(address, store_bytes)
        try:
            self._room = self._take_room(address, processes, accelerated, platform)
        except BaseException:
            self._leave()
            raise
        self._actors: dict[int, Any] = {}

    def _connect(self, address: str | None, store_bytes: int | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address is None:
                given = {"include_dashboard": False, "object_store_memory": store_bytes}
                self._ray.init("local", **quiet, **given)
            else:
                self._ray.init(address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = f"--ray-address {address}" if address else "a Ray of this machine"
            raise RunError(f"{where}: {str(error).strip().splitlines()[0]}") from error
        self._started = True

    # -- room -----------------------------------------------------------------------------------

    def _take_room(
        self, address: str | None, processes: int, accelerated: int, platform: str | None
    ) -> Any:
        group = importlib.import_module("ray.util.placement_group")
        has = self._ray.cluster_resources()
        alone = self._started and address is None
        # A machine of one's own is shared evenly, however few cores it has.
        cores = min(1.0, int(1e4 * has.get("CPU", 0) / processes) / 1e4) if alone else 1.0
        kind = _ACCELERATORS.get(platform or "")
        bundles = [
            {"CPU": cores} | ({kind: 1} if kind and i < accelerated else {})
            for i in range(processes)
        ]
        wanted = {"CPU": cores * processes} | ({kind: accelerated} if kind else {})
        lacking = {name: need for name, need in wanted.items() if need > has.get(name, 0)}
        if lacking:
            raise RunError(_lacks(processes, lacking, has, "has"))
        room = group.placement_group(bundles, strategy="SPREAD")
        if not room.wait(SECONDS_FOR_ROOM):
            free = self._ray.available_resources()
            group.remove_placement_group(room)
            raise RunError(_lacks(processes, wanted, free, "has free"))
        return room

    # -- processes ------------------------------------------------------------------------------

    def start(self, kind: type, number: int) -> Any:
        """A new process in this place; one that is there is ended."""
        self.end(number)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        at = strategies.PlacementGroupSchedulingStrategy(self._room, number)
        bundle = self._room.bundle_specs[number]
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
        """Ends all processes, and Ray where it was started for them."""
        with self._still_there():
            for number in list(self._actors):
                self.end(number)
            group = importlib.import_module("ray.util.placement_group")
            group.remove_placement_group(self._room)
        self._leave()

    def _leave(self) -> None:
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()

    @contextlib.contextmanager
    def _still_there(self) -> Iterator[None]:
        """What is ended already need not be ended."""
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
                yield


def _lacks(processes: int, wanted: dict[str, float], has: dict[str, float], verb: str) -> str:
    needs = " and ".join(f"{need:g} {name}s" for name, need in wanted.items())
    there = " and ".join(f"{has.get(name, 0):g}" for name in wanted)
    return (
        f"Ray: {processes} processes (mesh.data workers and parallel.servers servers, a CPU each) "
        f"need {needs}, and the cluster {verb} {there}; ask for fewer, or join a larger cluster"
    )
