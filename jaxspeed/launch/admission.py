"""Who connects to process 0: a proof of the run's token, and refusals that end nothing.

Each side proves by a keyed hash over the other's random number that it has the token, so that none
shows it: another user's program may listen on the port before process 0 does. Without a token, as
of processes that no launcher of jaxspeed has started, all who can connect are taken for the run's.

Lines are JSON objects. Process 0 sends its number; the other says who it is (`hello`); then answers
follow: signs of life, and at the end the problem, or "" if there is none (`answer`).
"""

import contextlib
import errno
import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.errors import RunError

log = logging.getLogger("jaxspeed")
LONGEST = 4096  # bytes of a line to process 0
_HELLO = 10.0  # seconds in which a process that connects says who it is
_SECONDS_TO_SEND = 10.0
_NEWCOMERS = 64  # connections that have not yet said it, besides one of each process
_REPORTED = 8  # addresses whose refusal is logged
_PLAIN = 253  # characters of a host's name


def _proof(token: str, *said: object) -> str:
    return hmac.new(token.encode(), json.dumps(said).encode(), "sha256").hexdigest()


def hello(token: str, number: str, rank: int, count: int, host: str) -> dict[str, Any]:
    """What a process says to a process 0 that has sent its number."""
    mine = secrets.token_hex(16)
    proof = _proof(token, "hello", number, mine, rank, count, host)
    return {"rank": rank, "count": count, "host": host, "number": mine, "proof": proof}


def answer(token: str, number: str, place: int, problem: str | None) -> dict[str, Any]:
    """Process 0's answer, the `place`-th to the hello with this number; None: a sign of life."""
    return {"problem": problem, "proof": _proof(token, "answer", number, place, problem)}


def verified_answer(said: dict[str, Any], token: str, number: str, place: int) -> str | None:
    """The problem of process 0's answer.

    Raises:
      ValueError: it refuses this process, or is not process 0 of this run.
    """
    if isinstance(refused := said.get("refused"), str):
        raise ValueError(f"it has refused this one, {_plain(refused)}")
    problem = said.get("problem")
    expected = answer(token, number, place, problem)["proof"]
    if not (problem is None or isinstance(problem, str)) or not _is_equal(
        said.get("proof"), expected
    ):
        raise ValueError("it does not have the token of this run")
    return problem


def _is_equal(received: object, expected: str) -> bool:
    return isinstance(received, str) and hmac.compare_digest(
        received.encode("utf-8", "replace"), expected.encode()
    )


def parsed(line: bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
      ValueError: it is none.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"it says {constant}")

    try:
        message = json.loads(line, parse_constant=refuse)
    except RecursionError:
        raise ValueError("its line is nested too deeply") from None
    except ValueError:
        raise ValueError("its line is not JSON") from None
    if not isinstance(message, dict):
        raise ValueError("its line is not an object")
    return message


def encoded(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _plain(text: str) -> str:
    """What another side says, as it may be shown on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:_PLAIN])


@dataclass
class Member:
    """A process that has been admitted.

    Attributes:
      name: its host.
    """

    peer: socket.socket
    rank: int
    count: int
    name: str
    number: str
    token: str = field(repr=False)
    answers: int = 0

    def send(self, problem: str | None) -> None:
        """Send an answer; None, a sign of life, is not waited for."""
        line = encoded(answer(self.token, self.number, self.answers, problem))
        self.answers += 1
        with contextlib.suppress(OSError):
            self.peer.settimeout(0 if problem is None else _SECONDS_TO_SEND)
            self.peer.sendall(line)

    def has_left(self) -> bool:
        """Whether its side has closed the connection: it starts again."""
        try:
            self.peer.setblocking(False)
            return self.peer.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


@dataclass
class _Newcomer:
    peer: socket.socket
    where: str
    until: float
    number: str = field(default_factory=lambda: secrets.token_hex(16))
    data: bytes = b""


class Admission:
    """Connections to process 0, several at a time, until they say who they are.

    Close it to close those that have not been admitted.
    """

    def __init__(self, servers: Sequence[socket.socket], count: int, token: str) -> None:
        self._count, self._token = count, token
        self._newcomers: dict[socket.socket, _Newcomer] = {}  # the oldest first
        self._reported: set[str] = set()
        self._selector = selectors.DefaultSelector()
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for peer in self._newcomers:
            peer.close()

    def next(self, until: float) -> Member | None:
        """The next process of the run that connects until then.

        Raises:
          RunError: this process may not open enough files.
        """
        while (now := time.monotonic()) < until:
            late = [
                connection for connection in self._newcomers.values() if connection.until <= now
            ]
            for connection in late:
                self._refuse(connection, f"it did not say who it is within {_HELLO:.0f} s")
            first = next(iter(self._newcomers.values()), None)
            wait = min(until, first.until if first is not None else until) - now
            for key, _ in self._selector.select(max(wait, 0.001)):
                newcomer = self._newcomers.get(key.fileobj)  # type: ignore[call-overload]
                if newcomer is not None:
                    if (member := self._read(newcomer)) is not None:
                        return member
                elif key.data is None:
                    self._accept(key.fileobj)
        return None

    def _accept(self, server: Any) -> None:
        try:
            peer, address = server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        peer.setblocking(False)
        newcomer = _Newcomer(peer, _where(peer, address), time.monotonic() + _HELLO)
        self._newcomers[peer] = newcomer
        self._selector.register(peer, selectors.EVENT_READ, newcomer)
        if len(self._newcomers) > self._count + _NEWCOMERS:
            self._make_room()
        with contextlib.suppress(OSError):
            peer.send(encoded({"number": newcomer.number}))

    def _make_room(self) -> None:
        oldest = next(iter(self._newcomers.values()), None)
        if oldest is None:
            raise RunError(f"too many open files for {self._count} processes; raise `ulimit -n`")
        self._refuse(oldest, "too many connect, and do not say who they are")

    def _read(self, newcomer: _Newcomer) -> Member | None:
        try:
            part = newcomer.peer.recv(LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        newcomer.data += part
        line, ended, _ = newcomer.data.partition(b"\n")
        if len(line) > LONGEST:
            self._refuse(newcomer, f"its line is longer than {LONGEST} bytes")
        elif ended:
            try:
                member = self._admitted(newcomer, parsed(line))
            except ValueError as error:
                self._refuse(newcomer, str(error))
            else:
                self._forget(newcomer)
                return member
        elif not part:
            self._refuse(newcomer, "it closed the connection before it said who it is")
        return None

    def _admitted(self, newcomer: _Newcomer, said: dict[str, Any]) -> Member:
        rank, count, host, number = (said.get(name) for name in ("rank", "count", "host", "number"))
        if not (type(rank) is int and type(count) is int) or not (
            isinstance(host, str) and isinstance(number, str)
        ):
            raise ValueError("its line does not say rank, count, host and number")
        expected = _proof(self._token, "hello", newcomer.number, number, rank, count, host)
        if not _is_equal(said.get("proof"), expected):
            raise ValueError("it does not have the token of this run")
        if count == self._count and not 0 < rank < count:
            raise ValueError(f"its rank, {rank}, is not one of 1 to {count - 1}")
        name = f"{_plain(host)} ({newcomer.where})"
        return Member(newcomer.peer, rank, count, name, number, self._token)

    def _forget(self, newcomer: _Newcomer) -> None:
        self._selector.unregister(newcomer.peer)
        del self._newcomers[newcomer.peer]

    def _refuse(self, newcomer: _Newcomer, why: str) -> None:
        self._forget(newcomer)
        with contextlib.suppress(OSError):
            newcomer.peer.send(encoded({"refused": why}))
        newcomer.peer.close()
        if newcomer.where in self._reported or len(self._reported) > _REPORTED:
            return
        self._reported.add(newcomer.where)
        if len(self._reported) > _REPORTED:
            log.warning("process 0 refused further connections, which are not reported")
        else:
            log.warning("process 0 refused a connection from %s: %s", newcomer.where, why)


def _where(peer: socket.socket, address: Any) -> str:
    """The address of the other side; of a UNIX socket, its process and user."""
    if peer.family != socket.AF_UNIX:
        return str(address[0]).removeprefix("::ffff:")
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"process {pid} of user {user}"
