"""The processes of a run meet on the coordinator's port, before JAX takes it.

JAX's own start ends a process natively where something is wrong (0.10.2): a missing process is a
DEADLINE_EXCEEDED without its rank after the time-out, an occupied port a segmentation fault. Here
process 0 listens first, waits for the others, and answers all at once with what it knows; then it
closes the port, and `jax.distributed.initialize` follows. While they wait, they say for whom.
Process 0 sends an empty object now and then, so that the others know whether it is stuck.
"""

import contextlib
import errno
import ipaddress
import json
import logging
import math
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxspeed.errors import ExitCode, RunError

log = logging.getLogger("jaxspeed")
_PAUSE = 0.5  # seconds between attempts to connect
_SILENCE = 30.0  # seconds until a process says what it waits for; then doubled each time
_HELLO = 10.0  # seconds in which a process that connects says who it is
_LONGEST = 65536  # bytes of a line
_FILES = 512  # open files of process 0 besides a connection from each process, to us and to JAX


def meet(coordinator: str, count: int, rank: int, seconds: float) -> None:
    """Wait until all processes are there.

    Raises:
      RunError: some are missing after `seconds`, the port is occupied, or nothing answers there.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        raise RunError(f"the coordinator's address is {coordinator!r}; it needs HOST:PORT")
    if rank == 0:
        _listen(host, int(port), count, seconds)
    else:
        _connect(host, int(port), count, rank, seconds)


def _listen(host: str, port: int, count: int, seconds: float) -> None:
    _allow_connections(count)
    try:
        server = socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    except OSError as error:
        try:  # a system without IPv6
            server = socket.create_server(("", port), backlog=1024)
        except OSError:
            raise RunError(
                f"port {port} on {socket.gethostname()}, the coordinator's: "
                f"{error.strerror or error}. Another program uses it, or an earlier run that has "
                "not ended"
            ) from None
    silence, deadline = _Silence(), time.monotonic() + seconds
    sign_of_life = 0.0  # when the next one is due
    found: dict[int, tuple[socket.socket, str]] = {}
    peers: list[socket.socket] = []
    problem = ""
    with server, contextlib.ExitStack() as opened:
        while len(found) < count - 1 and not problem and time.monotonic() < deadline:
            if time.monotonic() >= sign_of_life:
                sign_of_life = time.monotonic() + _SILENCE / 3
                for peer in peers:
                    with contextlib.suppress(OSError):
                        peer.send(b"{}\n", socket.MSG_DONTWAIT)
            until = min(silence.until, deadline, sign_of_life)
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                peer, address = server.accept()
            except TimeoutError:
                if silence.is_over():
                    _say(_missing(host, count, found, f"have not started (limit {seconds:.0f} s)"))
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    problem = f"too many open files for {count} processes; raise `ulimit -n`"
                continue
            opened.enter_context(peer)
            try:
                peer.send(b"{}\n", socket.MSG_DONTWAIT)
                said = json.loads(_Lines(peer).next(time.monotonic() + _HELLO))
                peer.settimeout(10)
                other, name = int(said["rank"]), f"{said['host']} ({address[0]})"
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not one of a run: a port scanner, a health check
            if said["count"] != count:
                problem = f"process {other} on {name} belongs to a run of {said['count']} processes"
            elif other in found and not _is_closed(found[other][0]):
                problem = f"process {other} was started twice: on {found[other][1]} and on {name}"
            found[other] = (peer, name)
            peers.append(peer)
        if not problem and len(found) < count - 1:
            problem = _missing(host, count, found, f"did not start within {seconds:.0f} s")
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(json.dumps({"error": problem}).encode() + b"\n")
    if problem:
        raise RunError(problem)


def _allow_connections(count: int) -> None:
    """Raise the limit of open files, often 1024: each process connects here and to JAX."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + _FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "process 0 may open %d files, and %d processes connect to it: raise `ulimit -Hn`",
            allowed,
            count,
        )


def _missing(coordinator: str, count: int, found: dict[int, Any], verdict: str) -> str:
    missing = [rank for rank in range(1, count) if rank not in found]
    here = socket.gethostname()
    hosts = sorted({name for _, name in found.values()} | {here})
    shown = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    text = (
        f"of {count} processes, {len(missing)} {verdict}: {shown}. The others are on "
        f"{', '.join(hosts[:20])}"
    )
    if not _is_of_this_host(coordinator):
        text += f". The coordinator's address, {coordinator}, is not one of {here}"
    return text


def _is_of_this_host(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
        return True
    return False


class _Silence:
    """When a process that waits shows what it waits for: less and less often."""

    def __init__(self) -> None:
        self._seconds = _SILENCE
        self.until = time.monotonic() + self._seconds

    def is_over(self) -> bool:
        if time.monotonic() < self.until:
            return False
        self._seconds *= 2
        self.until += self._seconds
        return True


@contextlib.contextmanager
def explained_wait(what: str, end_after: float = math.inf) -> Iterator[None]:
    """Say what the `with` block waits for while it lasts, in a thread.

    After `end_after` seconds the thread ends this process, for a block that cannot be interrupted.
    """
    over, silence, deadline = threading.Event(), _Silence(), time.monotonic() + end_after

    def explain() -> None:
        while not over.wait(max(min(silence.until, deadline) - time.monotonic(), 0)):
            if time.monotonic() >= deadline:
                print(f"jaxspeed: {what}", file=sys.stderr, flush=True)
                os._exit(ExitCode.CRASH)
            if silence.is_over():
                _say(what)

    thread = threading.Thread(target=explain, name="jaxspeed-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(text: str) -> None:
    print(f"waiting: {text}", file=sys.stderr, flush=True)


def _connect(host: str, port: int, count: int, rank: int, seconds: float) -> None:
    silence, deadline = _Silence(), time.monotonic() + seconds
    said = json.dumps({"rank": rank, "count": count, "host": socket.gethostname()})
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as peer:
                peer.sendall(said.encode() + b"\n")
                problem = _answer(peer, f"{host}:{port}", rank, seconds, silence, deadline)
            break
        except (OSError, ValueError) as error:
            # Also the end of a process 0 that starts again, or JAX's service of an earlier run.
            why = _unreachable(host, port, error)
            if time.monotonic() > deadline:
                raise RunError(f"{why} (limit {seconds:.0f} s)") from None
            if silence.is_over():
                _say(f"process {rank}: {why} (limit {seconds:.0f} s)")
        time.sleep(_PAUSE)
    if problem:
        raise RunError(problem)


def _answer(
    peer: socket.socket,
    where: str,
    rank: int,
    seconds: float,
    silence: "_Silence",
    deadline: float,
) -> str:
    """Process 0's answer: the problem, "" if there is none.

    It may come after the deadline, which is later on a process 0 that has started later; signs of
    life come until then.

    Raises:
      RunError: there is no sign of life at the deadline, or for a while after it.
    """
    why = f"process 0 has accepted the connection to {where}, and does not answer"
    limit = f"(limit {seconds:.0f} s)"
    lines, heard = _Lines(peer), -math.inf
    deadline = max(deadline, time.monotonic() + 1)
    while True:
        try:
            said = json.loads(lines.next(min(silence.until, max(deadline, heard + _SILENCE))))
            if "error" in said:
                return str(said["error"])
            heard = time.monotonic()
        except (RecursionError, TypeError):
            raise ValueError("not an object") from None
        except TimeoutError:
            now = time.monotonic()
            if now >= max(deadline, heard + _SILENCE):
                raise RunError(f"{why} {limit}: it is stuck, or another program") from None
            if silence.is_over() and now >= heard + _SILENCE:
                _say(f"process {rank}: {why} {limit}")


def _unreachable(host: str, port: int, error: Exception) -> str:
    """What the failure of the last attempt means, and what often causes it."""
    if isinstance(error, ConnectionRefusedError):
        why = "nothing listens on this port: process 0 has not started there, or has ended"
    elif isinstance(error, socket.gaierror):
        why = "no host has this name"
    elif isinstance(error, TimeoutError):
        why = "no answer: a firewall, or an address that this host cannot reach"
    elif isinstance(error, ValueError):
        why = "what answers there is not process 0 of this run"
    else:
        why = getattr(error, "strerror", None) or str(error)
    hints = []
    if is_loopback(host):
        hints.append("the address is this host's own, so it is right only on the host of process 0")
    if proxies := set_proxies():
        hints.append(f"set here: {', '.join(proxies)}; processes connect without a proxy")
    text = f"the coordinator {host}:{port} is not reached: {why}"
    return "; ".join([text, *hints])


def set_proxies() -> list[str]:
    """The variables of the environment that name proxies."""
    kinds = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    return sorted(name for name in os.environ if name.lower() in kinds)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Lines:
    """The lines that the other side of a connection sends."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._data = peer, b""

    def next(self, until: float) -> bytes:
        """The next line.

        Raises:
          TimeoutError: it is not complete until then; a later call goes on.
          ValueError: it is too long, or the connection was closed.
        """
        while b"\n" not in self._data:
            if len(self._data) > _LONGEST:
                raise ValueError("the line is too long")
            if (rest := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._peer.settimeout(rest)
            part = self._peer.recv(4096)
            if not part:
                raise ValueError("the connection was closed")
            self._data += part
        line, _, self._data = self._data.partition(b"\n")
        return line


def _is_closed(peer: socket.socket) -> bool:
    """Whether the other side has closed the connection: it starts again."""
    try:
        peer.setblocking(False)
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            peer.settimeout(10)
