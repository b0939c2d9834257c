"""The address of process 0: a host and a port, or the UNIX socket of a run on one host.

The launcher makes that socket in its own folder, which no other user can enter.
"""

import contextlib
import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from jaxspeed.errors import RunError

_UNIX = "unix:"  # as JAX, and gRPC, write it
_BACKLOG = 1024


@dataclass(frozen=True)
class Address:
    """A host and port, or the path of a UNIX socket."""

    host: str
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """The address of HOST:PORT or unix:PATH.

        Raises:
          RunError: it is neither.
        """
        if text.startswith(_UNIX) and text != _UNIX:
            return cls(socket.gethostname(), path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise RunError(f"the coordinator's address is {text!r}; it needs HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_of_one_host(self) -> bool:
        """Whether it has a meaning only on the host of process 0."""
        return bool(self.path) or is_loopback(self.host)

    def connected(self, seconds: float) -> socket.socket:
        if not self.path:
            return socket.create_connection((self.host, self.port), timeout=seconds)
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.settimeout(seconds)
            peer.connect(self.path)
        except OSError:
            peer.close()
            raise
        return peer


@dataclass
class Listening:
    """The sockets of process 0 that listen at an address; a context that closes them.

    Attributes:
      address: where JAX's service listens after them.
      unconfined: why they listen on all addresses of the host; "" if they do not.
    """

    sockets: list[socket.socket]
    address: str
    unconfined: str = ""
    path: str = ""

    def places(self) -> list[str]:
        """The address or path of each socket."""
        names = [listener.getsockname() for listener in self.sockets]
        return [name if isinstance(name, str) else str(name[0]) for name in names]

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.sockets:
            listener.close()
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def listen(at: Address) -> Listening:
    """Listen at an address alone, or at all of the host if its name is ambiguous.

    Raises:
      RunError: the port or the socket is in use, or its folder is not there.
    """
    try:
        if at.path:
            return Listening([_unix_server(at.path)], str(at), path=at.path)
        return _listen_at_port(at)
    except OSError as error:
        what = f"the socket {at.path}" if at.path else f"port {at.port}"
        raise RunError(
            f"{what} on {socket.gethostname()}, the coordinator's: {error.strerror or error}. "
            "Another program uses it, or an earlier run that has not ended"
        ) from None


def _unix_server(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        try:
            server.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left(path):
                raise
            os.unlink(path)
            server.bind(path)
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server


def _is_left(path: str) -> bool:
    """Whether the process that listened at a UNIX socket has gone."""
    if not Path(path).is_socket():
        return False
    try:
        Address("", path=path).connected(1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _listen_at_port(at: Address) -> Listening:
    here = socket.gethostname()
    if at.host == "::":
        return Listening([_server_of_all(at.port)], str(at))
    try:
        resolved = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except OSError:
        resolved, unconfined = [], f"the coordinator's name, {at.host}, is not known on {here}"
    else:
        unconfined = f"the coordinator's address, {at.host}, is not one of {here}"
    places = dict.fromkeys((family, place) for family, _, _, _, place in resolved)
    if not is_loopback(at.host) and any(is_loopback(str(place[0])) for _, place in places):
        # As Debian's /etc/hosts has it of a host's own name; others reach another address.
        places, unconfined = {}, f"the coordinator's name, {at.host}, is a loopback address here"
    sockets: list[socket.socket] = []
    try:
        for family, place in places:
            try:
                sockets.append(socket.create_server(place, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if sockets:
            return Listening(sockets, str(at))
        return Listening([_server_of_all(at.port)], f"[::]:{at.port}", unconfined)
    except OSError:
        for listener in sockets:
            listener.close()
        raise


def _server_of_all(port: int) -> socket.socket:
    try:
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=_BACKLOG)  # a system without IPv6


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
