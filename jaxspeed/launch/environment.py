"""The processes of a run, found from the environment and joined through `jax.distributed`.

Coordinator, count and rank are what `jaxspeed launch` and its manifests set (`VARIABLES`), or what
JAX detects of SLURM, Open MPI, Kubernetes and TPU pods. Two things differ from
`jax.distributed.initialize()` without arguments: the processes of a host share its GPUs evenly,
where JAX gives one GPU to each, and Open MPI 5 is found, which no longer sets what JAX reads.
"""

import importlib.util
import os
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge
from jax._src.lib import _jax
from jax.extend.backend import register_backend_factory

from jaxspeed.errors import ConfigError, RunError
from jaxspeed.launch.address import Address
from jaxspeed.launch.binding import shared_evenly, visible_gpus
from jaxspeed.launch.rendezvous import explained_wait, meet, set_proxies
from jaxspeed.launch.variables import BIND, COORDINATOR, COUNT, RANK, TOKEN, VARIABLES

START_SECONDS = 1800  # between the first and the last host of a run
JAX_SECONDS = 60  # for JAX's own start if all have met late; at most half of the limit
# JAX waits two minutes for the devices of each process, once they have met (0.11.2, 0.12.0.1).
_LATE_DEVICES = re.compile(r"\blocal_topology/\w+/(\d+) and duration: (\w+)")
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"  # which JAX reads
# Rank and count of the processes of one host, by what started them.
_LOCAL = {
    "slurm": ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "ompi": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


@dataclass(frozen=True)
class Membership:
    """One process of a run.

    Attributes:
      coordinator: address at which process 0 is reached.
      count: number of processes.
      rank: this one's number.
      found_by: what the values are from, for messages.
      gpus: indices of the visible GPUs that this process computes on; None: all of them.
    """

    coordinator: str
    count: int
    rank: int
    found_by: str
    gpus: tuple[int, ...] | None = None


def start_processes(seconds: float | None = None) -> Membership | None:
    """Join the run's other processes, if the environment names any. Call it before JAX starts.

    That takes `seconds` at most, by default half an hour; half as much more if the last process has
    come late. A no-op if this is the only process, or if `jax.distributed` is initialized. Commands
    call it, and so does `jaxspeed.initialize`; a script that uses JAX before that calls it first.

    Raises:
      ConfigError: the environment is incomplete.
      RunError: JAX has started without the others, or they cannot be joined.
    """
    if jax.distributed.is_initialized():
        return None
    membership = find_membership()
    if membership is None:
        return None
    which = f"process {membership.rank} of {membership.count} (from {membership.found_by})"
    if xla_bridge.backends_are_initialized():
        raise RunError(
            f"this is {which}, but JAX has started alone: call jaxspeed.start_processes() before "
            f"any use of JAX. For processes that train apart, set {COUNT}=1"
        )
    seconds = START_SECONDS if seconds is None else seconds
    until = time.monotonic() + seconds
    try:
        address = Address.parse(membership.coordinator)
        token, bind = os.environ.get(TOKEN, ""), os.environ.get(BIND, "")
        listens_at = meet(
            membership.coordinator, membership.count, membership.rank, seconds, token, bind
        )
    except RunError as error:
        raise RunError(f"{which} cannot start: {error}") from None
    _reach_without_proxy(address)
    rest = max(until - time.monotonic(), min(JAX_SECONDS, seconds / 2))
    waits = f"{which}: all have met, and not all have joined JAX's service (limit {seconds:.0f} s)"
    try:
        # JAX ends a process natively at its time-out, without a word on which one is late.
        with explained_wait(waits, end_after=rest):
            jax.distributed.initialize(
                membership.coordinator,
                membership.count,
                membership.rank,
                local_device_ids=membership.gpus,
                cluster_detection_method="deactivate",
                initialization_timeout=int(rest) + 30,
                coordinator_bind_address=listens_at,  # by default all addresses
            )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"{which} cannot join those of {membership.coordinator}: {reason}"
        ) from error
    if address.is_of_one_host and jax.config.jax_cpu_collectives_implementation == "gloo":
        register_backend_factory("cpu", _cpu_client_on_loopback, priority=0, fail_quietly=False)
    return membership


def _cpu_client_on_loopback() -> Any:
    """JAX's CPU client, whose Gloo listens at the address of the host's name by default."""
    gloo = _jax.make_gloo_tcp_collectives(
        distributed_client=distributed.global_state.client, hostname="127.0.0.1"
    )
    return xla_bridge.make_cpu_client(collectives=gloo)


def late_devices(error: BaseException) -> tuple[int, str] | None:
    """The process whose devices JAX waited for in vain, and how long, if that is the error."""
    match = _LATE_DEVICES.search(str(error))
    return (int(match[1]), match[2]) if match else None


def _reach_without_proxy(coordinator: Address) -> None:
    """Exempt the coordinator from the environment's proxies, which gRPC uses, but `meet` does not.

    A proxy that cannot reach it ends JAX natively (0.11.2, 0.12.0.1), when the time-out is over.
    """
    if coordinator.path or not set_proxies():
        return
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")  # gRPC reads the first that is set
    exempt = next((os.environ[name] for name in names if os.environ.get(name)), "")
    os.environ[names[0]] = f"{exempt},{coordinator.host}".lstrip(",")


def find_membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """The place of this process among those of its run; None if it is alone.

    Raises:
      ConfigError: the environment is incomplete, or Kubernetes does not answer.
    """
    stated = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if stated.get(COUNT) == "1":
        return None
    if COUNT in stated or RANK in stated:
        return _stated(stated)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 and _OPEN_MPI_4 not in environment:
        return _open_mpi_5(environment)  # first: SLURM may have started Open MPI's daemons
    for cluster in clusters.ClusterEnv._cluster_types:
        try:
            if _concerns(cluster, environment) and cluster.is_env_present():
                return _detected(cluster, environment)
        # It may ask a server, of a TPU pod or of Kubernetes.
        except (RuntimeError, KeyError, ValueError, OSError, ImportError) as error:
            raise ConfigError(
                f"JAX cannot detect the processes of {cluster.name}: {error}\nSet "
                f"{', '.join(VARIABLES)}; {COUNT}=1 for processes that train apart"
            ) from error
    return None


def _stated(stated: Mapping[str, str]) -> Membership:
    if missing := [name for name in VARIABLES if name not in stated]:
        raise ConfigError(f"{' and '.join(stated)} set, but not {' and '.join(missing)}")
    try:
        count, rank = int(stated[COUNT]), int(stated[RANK])
    except ValueError:
        raise ConfigError(f"{COUNT}={stated[COUNT]}, {RANK}={stated[RANK]}: not numbers") from None
    if not 0 <= rank < count:
        raise ConfigError(f"{RANK}={rank}: needs 0 to {count - 1}, as {COUNT} is {count}")
    return Membership(stated[COORDINATOR], count, rank, COUNT)


def _concerns(cluster: Any, environment: Mapping[str, str]) -> bool:
    """Whether to ask JAX's detection: it queries servers, and warns, of Kubernetes and TPUs."""
    if cluster.opt_in_only_method:
        return False
    if cluster.name == "k8s":
        has_client = importlib.util.find_spec("kubernetes") is not None
        return has_client and "JOB_COMPLETION_INDEX" in environment
    on_cpu = jax.config.jax_platforms == "cpu"
    return not (on_cpu and cluster.name.endswith("tpu"))


def _detected(cluster: Any, environment: Mapping[str, str]) -> Membership | None:
    """What JAX detects, if that is more than one process."""
    count = cluster.get_process_count()
    if count == 1:
        return None
    coordinator = environment.get(COORDINATOR) or cluster.get_coordinator_address(
        timeout_secs=START_SECONDS,
        override_coordinator_port=environment.get("JAX_COORDINATOR_PORT"),
    )
    rank = cluster.get_process_id()
    gpus = _gpus(environment, *_LOCAL[cluster.name]) if cluster.name in _LOCAL else None
    return Membership(coordinator, count, rank, cluster.name, gpus)


def _open_mpi_5(environment: Mapping[str, str]) -> Membership:
    count = int(environment["OMPI_COMM_WORLD_SIZE"])
    coordinator = environment.get(COORDINATOR)
    if coordinator is None:
        if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != str(count):
            raise ConfigError(
                "Open MPI 5 does not name the host of rank 0: mpirun -x "
                f"{COORDINATOR}=HOST:PORT, or `jaxspeed launch --on mpi`"
            )
        job = environment.get("PMIX_NAMESPACE", "")
        coordinator = f"127.0.0.1:{61440 + zlib.crc32(job.encode()) % 4096}"  # JAX's port range
    rank = int(environment["OMPI_COMM_WORLD_RANK"])
    return Membership(coordinator, count, rank, "ompi", _gpus(environment, *_LOCAL["ompi"]))


def _gpus(environment: Mapping[str, str], rank: str, count: str) -> tuple[int, ...] | None:
    """This process's share of the GPUs that all processes of its host see."""
    here = _expanded(environment.get(count, ""))
    if not here or rank not in environment:
        return None
    processes = here[int(environment.get("SLURM_NODEID", 0)) if len(here) > 1 else 0]
    gpus = range(len(visible_gpus(environment)))
    if len(gpus) < processes:  # each sees its own
        return None
    return tuple(shared_evenly(gpus, int(environment[rank]), processes))


def _expanded(counts: str) -> list[int]:
    """Processes by host, from SLURM's form: 4(x2),3 is 4, 4, 3."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in groups for _ in range(int(times or 1))]
