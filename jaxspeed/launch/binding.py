"""Cores and GPUs of a host, divided between its processes by local rank."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def shared_evenly[T](of: Sequence[T], local_rank: int, processes: int) -> Sequence[T]:
    """The local rank's consecutive share; the first ranks have one more if it does not divide."""
    size, more = divmod(len(of), processes)
    first = local_rank * size + min(local_rank, more)
    return of[first : first + size + (local_rank < more)]


def visible_gpus(environment: Mapping[str, str] = os.environ, root: str = "/") -> list[str]:
    """The NVIDIA GPUs that a process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    devices = (
        re.fullmatch(r"nvidia(\d+)", file.name) for file in Path(root, "dev").glob("nvidia*")
    )
    return [str(index) for index, _ in enumerate(filter(None, devices))]


def has_gpus(environment: Mapping[str, str]) -> bool:
    """Whether processes with this environment compute on GPUs."""
    return environment.get("JAX_PLATFORMS") != "cpu" and bool(visible_gpus(environment))


def allowed_cores(root: str = "/") -> list[int]:
    """The cores of this process, those of a socket and the threads of a core side by side.

    So a consecutive share is local: GPUs of one socket have neighbouring indices too.
    """

    def place(cpu: int) -> tuple[int, int, int]:
        topology = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            socket = int((topology / "physical_package_id").read_text())
            return socket, int((topology / "core_id").read_text()), cpu
        except (OSError, ValueError):  # not shown in some containers
            return 0, cpu, cpu

    return sorted(os.sched_getaffinity(0), key=place)
