"""Processes of a run on several hosts, each host's by an agent over ssh."""

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import PurePath
from queue import SimpleQueue
from typing import Any

from jaxspeed.errors import ConfigError
from jaxspeed.launch.address import is_loopback
from jaxspeed.launch.agent import decoded, encoded_job
from jaxspeed.launch.local_group import Ended, HostJob, Output

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=3"
LOST = 255  # ssh's own exit code


class RemoteGroup:
    """The processes of all hosts, whose events arrive in a queue.

    Args:
      jobs: what each host starts.
      ssh: the command before the name of a host.
    """

    def __init__(
        self, jobs: Mapping[str, HostJob], events: "SimpleQueue[Any]", ssh: str = SSH
    ) -> None:
        self._events = events
        self._agents: list[subprocess.Popen[str]] = []
        self._closing = False
        for host, job in jobs.items():
            self._start(host, job, ssh)

    def _start(self, host: str, job: HostJob, ssh: str) -> None:
        begin = [] if is_here(host) else [*_words(ssh), host]
        agent = [sys.executable, "-m", "jaxspeed.launch.agent"]
        if begin:
            exports = [f"{k}={v}" for k, v in job.environment.items() if k.startswith("PYTHON")]
            folder = shlex.quote(job.folder or ".")
            agent = [f"cd {folder} && exec {shlex.join(['env', *exports, *agent])}"]
        try:
            process = subprocess.Popen(
                [*begin, *agent],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C comes to the launcher alone
            )
        except OSError as error:
            self.close()
            raise ConfigError(f"{begin[0]}: {error.strerror}") from None
        self._agents.append(process)
        self._write(process, encoded_job(job))
        threading.Thread(target=self._read, args=(host, job, process), daemon=True).start()

    def _read(self, host: str, job: HostJob, process: "subprocess.Popen[str]") -> None:
        """Pass on the events of a host; if it is lost, its processes have ended."""
        ranks = set(range(job.first, job.first + job.processes))
        errors = threading.Thread(target=self._read_errors, args=(job.first, process), daemon=True)
        errors.start()
        assert process.stdout is not None
        for line in process.stdout:
            try:
                event = decoded(line)
            except ValueError:
                event = Output(job.first, line.rstrip())
            if isinstance(event, Ended):
                ranks.discard(event.rank)
            self._events.put(event)
        code = process.wait()
        errors.join(1.0)
        if ranks and not self._closing:
            text = f"{host}: the connection has ended with exit code {code}"
            self._events.put(Output(min(ranks), text, True))
        for rank in sorted(ranks):
            # Not ssh's own: the remote shell's, of a folder or a Python that is not there.
            self._events.put(Ended(rank, code or LOST, time.time()))

    def _read_errors(self, rank: int, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._events.put(Output(rank, line.rstrip(), True))

    def signal(self, number: int) -> None:
        for process in self._agents:
            self._write(process, str(int(number)))

    def resize(self) -> None:
        pass  # no process has a terminal

    def close(self) -> None:
        """End the connections; the agents end what still lives."""
        self._closing = True
        for process in self._agents:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._agents:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)

    @staticmethod
    def _write(process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()


def _words(ssh: str) -> list[str]:
    """The command before a host; after `--` ssh reads no more options."""
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh {ssh!r}: {error}") from None
    if not words:
        raise ConfigError("--ssh: needs a command")
    return words if PurePath(words[0]).name != "ssh" or words[-1] == "--" else [*words, "--"]


def is_here(host: str) -> bool:
    """Whether a name in a hostfile is this host's; addresses are reached over ssh."""
    return host in ("localhost", socket.gethostname(), socket.getfqdn())


def coordinator_host(hosts: list[str]) -> str:
    """The address of the first host, as the others reach it.

    Raises:
      ConfigError: it is a loopback address, and others are not.
    """
    first, *others = hosts
    apart = [host for host in others if not is_loopback(host)]
    if not apart:
        return "127.0.0.1" if is_loopback(first) else first
    if is_here(first):
        return _address_towards(apart[0])
    if is_loopback(first):
        raise ConfigError(
            f"the coordinator on {first} cannot be reached from {apart[0]}; give --coordinator"
        )
    return first


def _address_towards(host: str) -> str:
    """This host's address in the network of another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        try:
            towards.connect((host, 9))
        except OSError as error:
            raise ConfigError(f"{host}: {error.strerror}; give --coordinator") from None
        return str(towards.getsockname()[0])
