"""The schedulers of `jaxspeed launch --on`: what each submits, and which options it reads."""

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from jaxspeed.errors import ConfigError
from jaxspeed.launch.schedulers import ClusterJob, mpi_script, ray_script, slurm_script
from jaxspeed.launch.supervisor import Restarts

_EVERY = ("print", "cache", "save_seconds", "option")  # what all schedulers read
_OF_PODS: dict[str, Mapping[str, Any]] = {
    "--image": {"help": "container image (kubernetes, jobset)"},
    "--accelerator": {
        "default": "nvidia.com/gpu",
        "metavar": "RESOURCE",
        "help": "what --devices-per-process counts on Kubernetes (nvidia.com/gpu)",
    },
    "--volume": {
        "action": "append",
        "default": [],
        "metavar": "CLAIM:/PATH",
        "help": "a persistent volume claim for runs and cache (kubernetes, jobset); may be "
        "repeated",
    },
}


class JobScheduler(Protocol):
    """A scheduler.

    Attributes:
      program: what submits its jobs, and must be installed.
      reads: shared options of `jaxspeed launch` that it reads, with underscores.
      options: its own options, as `{"--flag": arguments of add_argument}`.
    """

    program: str
    reads: Collection[str] = ()
    options: Mapping[str, Mapping[str, Any]] = {}

    def script(self, job: ClusterJob, args: Namespace) -> str:
        """What is submitted, and printed by `--print`."""
        ...

    def command(self, job: ClusterJob, args: Namespace) -> list[str]:
        """The command that submits what it reads from its standard input."""
        return ["bash", "-s"]

    @property
    def names(self) -> frozenset[str]:
        """All options that it reads, with underscores."""
        of_scheduler = (flag.strip("-").replace("-", "_") for flag in self.options)
        return frozenset((*_EVERY, *self.reads, *of_scheduler))


class Slurm(JobScheduler):
    """SLURM."""

    program = "sbatch"
    reads = ("logs", "devices_per_process", "nodes", "name")

    def script(self, job: ClusterJob, args: Namespace) -> str:
        return slurm_script(job)

    def command(self, job: ClusterJob, args: Namespace) -> list[str]:
        Path(job.logs).mkdir(parents=True, exist_ok=True)  # SLURM opens its log there
        return ["sbatch"]


class OpenMpi(JobScheduler):
    """Open MPI."""

    program = "mpirun"
    reads = ("logs", "hostfile", "nodes", "name")

    def script(self, job: ClusterJob, args: Namespace) -> str:
        return mpi_script(job, args.hostfile)


@dataclass(frozen=True)
class Kubernetes(JobScheduler):
    """An Indexed Job or a JobSet of Kubernetes."""

    is_jobset: bool

    program = "kubectl"
    reads = ("devices_per_process", "name")
    options = _OF_PODS

    def script(self, job: ClusterJob, args: Namespace) -> str:
        from jaxspeed.launch.kubernetes import indexed_job, jobset

        if args.image is None:
            raise ConfigError(f"--on {args.on}: needs --image")
        if not args.volume:
            print("no --volume: checkpoints are lost with the pods", file=sys.stderr)
        if job.command[0] == sys.executable:
            job = replace(job, command=("python", *job.command[1:]))
        write = jobset if self.is_jobset else indexed_job
        # The path of its cache is one in the pods.
        return write(replace(job, cache=args.cache), args.image, args.accelerator, args.volume)

    def command(self, job: ClusterJob, args: Namespace) -> list[str]:
        return ["kubectl", *job.options, "create", "-f", "-"]


class Ray(JobScheduler):
    """Ray."""

    program = "ray"
    reads = ("logs", "devices_per_process", "max_restarts_without_progress", "grace")

    def script(self, job: ClusterJob, args: Namespace) -> str:
        restarts = (args.max_restarts, args.max_restarts_without_progress, args.grace)
        return ray_script(job, Restarts(*restarts))


SCHEDULERS: dict[str, JobScheduler] = {
    "slurm": Slurm(),
    "mpi": OpenMpi(),
    "kubernetes": Kubernetes(is_jobset=False),
    "jobset": Kubernetes(is_jobset=True),
    "ray": Ray(),
}
