"""Processes of a run on this host: started, read, signalled and waited for."""

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from jaxspeed.errors import ConfigError, ExitCode
from jaxspeed.launch.binding import allowed_cores, has_gpus, shared_evenly, visible_gpus
from jaxspeed.launch.variables import (
    BIND,
    COORDINATOR,
    COUNT,
    PROGRESS,
    RANK,
    TOKEN,
    file_of_stops,
)

# For `signal`, beside numbers of signals: SIGKILL, unless a process reports that it ends by itself.
GIVE_UP = 0
# After a process has ended, for the processes that it started, and for their output.
_SECONDS_TO_END, _SECONDS_TO_READ_ON = 0.5, 2.0


class Output(NamedTuple):
    """Output of a process: a line without its end, or, of a terminal, bytes as they came."""

    rank: int
    text: str
    error: bool = False
    raw: bytes = b""


class Ended(NamedTuple):
    """The end of a process; all of its output came before."""

    rank: int
    code: int  # -n: by signal n
    at: float  # time.time(); of one host, so only nearly comparable between hosts
    progress: int = 0  # step of the newest checkpoint, as rank 0 reported it


class Asked(NamedTuple):
    """A signal to the launcher itself."""

    number: int


Event = Output | Ended | Asked


@dataclass(frozen=True)
class HostJob:
    """What to start: `processes` ranks of `count`, from `first`, on one host.

    Attributes:
      command: the program of each process and its arguments.
      devices: number of devices of a process, GPUs or simulated ones; None: its share of the
        GPUs, or what the config simulates.
      slots: indices of the GPUs of this host that are divided; None: all that are visible.
      bind: give each process a share of the cores.
      terminal: show rank 0 a terminal, for its progress display.
      token: by which the processes know each other.
    """

    command: tuple[str, ...]
    processes: int
    count: int
    coordinator: str
    first: int = 0
    devices: int | None = None
    slots: tuple[int, ...] | None = None
    bind: bool = True
    terminal: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    token: str = field(default="", repr=False)


def started(job: HostJob, events: "SimpleQueue[Any]", progress: str) -> "LocalGroup | None":
    """The group for a launcher elsewhere. If it cannot start: None, and events that say why."""
    try:
        return LocalGroup(job, events, progress)
    except (ConfigError, OSError) as error:
        where = socket.gethostname()
        for rank in range(job.first, job.first + job.processes):
            events.put(Output(rank, f"error: {where}: {error}", True))
            events.put(Ended(rank, ExitCode.CONFIG, time.time()))
        return None


class LocalGroup:
    """The processes of a job on this host, whose events arrive in a queue.

    Create it in the main thread: the processes end with the thread that started them.
    """

    def __init__(self, job: HostJob, events: "SimpleQueue[Any]", progress: str) -> None:
        self._job, self._events, self._progress = job, events, progress
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._terminal: int | None = None
        cores = allowed_cores() if job.bind else []
        _check_gpus(job)
        for local_rank in range(job.processes):
            self._start(local_rank, cores)

    def _start(self, local_rank: int, cores: list[int]) -> None:
        job, rank = self._job, self._job.first + local_rank
        mine = shared_evenly(cores, local_rank, job.processes)
        begin = [sys.executable, "-I", "-S", str(Path(__file__).with_name("become_process.py"))]
        bound = ",".join(map(str, mine)) or "-"
        command = [*begin, str(os.getpid()), bound, *job.command]
        environment = {
            **os.environ,
            **job.environment,
            **process_environment(job, local_rank),
            PROGRESS: self._progress,
        }
        file_of_stops(self._progress, rank).unlink(missing_ok=True)  # of an earlier start
        ours, theirs = os.openpty() if job.terminal and rank == 0 else (None, None)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if theirs is None else theirs,
            stderr=subprocess.PIPE if theirs is None else theirs,
            env=environment,
            cwd=job.folder,
            start_new_session=True,  # a Ctrl-C comes to the launcher alone, which passes it on
        )
        self._processes[rank] = process
        if ours is not None and theirs is not None:
            os.close(theirs)
            self._terminal = ours
            self.resize()
            readers = [threading.Thread(target=self._read_terminal, args=(rank, ours))]
        else:
            streams = ((process.stdout, False), (process.stderr, True))
            readers = [
                threading.Thread(target=self._read, args=(rank, stream, is_error))
                for stream, is_error in streams
            ]
        waiter = threading.Thread(target=self._wait, args=(rank, process, readers))
        for thread in (*readers, waiter):
            thread.daemon = True
            thread.start()

    # -- what they do ---------------------------------------------------------------------------

    def _read(self, rank: int, stream: Any, is_error: bool) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                self._events.put(Output(rank, text, is_error))

    def _read_terminal(self, rank: int, terminal: int) -> None:
        with contextlib.suppress(OSError):  # EIO: its other end is closed
            while raw := os.read(terminal, 65536):
                self._events.put(Output(rank, raw.decode("utf-8", "replace"), raw=raw))

    def _wait(self, rank: int, process: "subprocess.Popen[bytes]", readers: Sequence[Any]) -> None:
        code = process.wait()
        at = time.time()
        # What it started itself may live, and hold its output open.
        for wait in (_SECONDS_TO_END, _SECONDS_TO_READ_ON):
            for reader in readers:
                reader.join(max(at + wait - time.time(), 0.0))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        self._events.put(Ended(rank, code, at, read_progress(self._progress)))

    # -- what is done to them -------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Send a signal to all that live; SIGKILL also to the processes that they started."""
        if number == GIVE_UP:
            lives = (rank for rank, process in self._processes.items() if process.poll() is None)
            if any(file_of_stops(self._progress, rank).exists() for rank in lives):
                return
            number = signal.SIGKILL
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)

    def resize(self) -> None:
        """Give rank 0's terminal the size of the launcher's."""
        if self._terminal is None:
            return
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        size = struct.pack("HHHH", lines, columns, 0, 0)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Kill what lives."""
        self.signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None


def _check_gpus(job: HostJob) -> None:
    """Raise ConfigError if this host has GPUs, but too few."""
    environment = {**os.environ, **job.environment}
    there = len(visible_gpus(environment))
    if not has_gpus(environment):
        return
    if job.slots and max(job.slots) >= there:
        raise ConfigError(
            f"the hostfile's slot {max(job.slots)}, but {there} GPUs on {socket.gethostname()}"
        )
    if job.devices and job.processes * job.devices > there:
        raise ConfigError(
            f"{job.processes} processes with {job.devices} devices each, but {there} GPUs on "
            f"{socket.gethostname()}; JAX_PLATFORMS=cpu simulates devices"
        )


def process_environment(job: HostJob, local_rank: int) -> dict[str, str]:
    """The variables by which a process finds the others and its own devices."""
    variables = {
        COORDINATOR: job.coordinator,
        COUNT: str(job.count),
        RANK: str(job.first + local_rank),
        TOKEN: job.token,
        **({BIND: job.coordinator} if job.coordinator.startswith("unix:") else {}),
        "PYTHONUNBUFFERED": "1",  # the last lines of one that is killed
    }
    environment = {**os.environ, **job.environment}
    if has_gpus(environment):
        gpus = visible_gpus(environment)
        if job.slots is not None:
            gpus = [gpus[slot] for slot in job.slots]
        mine = shared_evenly(gpus, local_rank, job.processes)
        if job.devices is not None:
            mine = gpus[local_rank * job.devices : (local_rank + 1) * job.devices]
        if mine:
            return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(mine)}
    elif job.devices is not None:
        flags = environment.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "host_platform_device_count" not in flag]
        simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices)}
        return {**variables, **simulated, "XLA_FLAGS": " ".join(kept)}
    return variables


def read_progress(path: str) -> int:
    """Step of the newest checkpoint that rank 0 reported."""
    try:
        return int(Path(path).read_text() or 0)
    except (OSError, ValueError):
        return 0
