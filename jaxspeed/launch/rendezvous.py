"""The processes of a run meet on the coordinator's port, before JAX takes it.

JAX's own start ends a process natively where something is wrong (0.10.2): a missing process is a
DEADLINE_EXCEEDED without its rank after the time-out, an occupied port a segmentation fault. Here
process 0 listens first, waits for the others, and answers all at once with what it knows; then it
closes the port, and `jax.distributed.initialize` follows.
"""

import contextlib
import ipaddress
import json
import logging
import os
import resource
import socket
import time
from typing import Any

from jaxspeed.errors import RunError

log = logging.getLogger("jaxspeed")
_PAUSE = 0.5  # seconds between attempts to connect
_OWN_FILES = 1024  # that process 0 may open besides
_ANSWER = 60.0  # seconds more than process 0 waits for the others


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
    deadline = time.monotonic() + seconds
    found: dict[int, tuple[socket.socket, str]] = {}
    peers: list[socket.socket] = []
    twice = ""
    with server, contextlib.ExitStack() as opened:
        while len(found) < count - 1 and not twice and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer, address = server.accept()
            except TimeoutError:
                break
            opened.enter_context(peer)
            try:
                peer.settimeout(10)
                said = json.loads(_line(peer))
                other, name = int(said["rank"]), f"{said['host']} ({address[0]})"
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not one of a run: a port scanner, a health check
            if said["count"] != count:
                twice = f"process {other} on {name} belongs to a run of {said['count']} processes"
            elif other in found and not _is_closed(found[other][0]):
                twice = f"process {other} was started twice: on {found[other][1]} and on {name}"
            found[other] = (peer, name)
            peers.append(peer)
        missing = [rank for rank in range(1, count) if rank not in found]
        text = twice or (_missing(missing, count, seconds, found) if missing else "")
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(json.dumps({"error": text}).encode() + b"\n")
    if text:
        raise RunError(text)


def _allow_connections(count: int) -> None:
    """Raise the limit of open files: each process connects here, and then to JAX's service."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OWN_FILES
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


def _missing(missing: list[int], count: int, seconds: float, found: dict[int, Any]) -> str:
    hosts = sorted({name for _, name in found.values()} | {socket.gethostname()})
    shown = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    return (
        f"of {count} processes, {len(missing)} did not start within {seconds:.0f} s: {shown}. "
        f"The others are on {', '.join(hosts[:20])}"
    )


def _connect(host: str, port: int, count: int, rank: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    said = json.dumps({"rank": rank, "count": count, "host": socket.gethostname()})
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as peer:
                peer.sendall(said.encode() + b"\n")
                peer.settimeout(max(deadline - time.monotonic(), 0) + _ANSWER)
                answer = json.loads(_line(peer))
            break
        except (OSError, ValueError) as error:
            # Also the end of a process 0 that starts again, or JAX's service of an earlier run.
            if time.monotonic() > deadline:
                raise RunError(_unreachable(host, port, seconds, error)) from None
        time.sleep(_PAUSE)
    if answer["error"]:
        raise RunError(answer["error"])


def _unreachable(host: str, port: int, seconds: float, error: Exception) -> str:
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
    if proxies := [name for name in os.environ if name.lower() in _PROXIES]:
        hints.append(f"set here: {', '.join(sorted(proxies))}; gRPC would use a proxy, unset them")
    text = f"the coordinator {host}:{port} was not reached for {seconds:.0f} s: {why}"
    return "; ".join([text, *hints])


_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _line(peer: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = peer.recv(4096)
        if not part or len(data) > 65536:
            raise ValueError("the connection was closed")
        data += part
    return data


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
