"""The processes of a run meet on the coordinator's address, before JAX takes it.

JAX's own start ends a process natively where something is wrong: a missing process is a
DEADLINE_EXCEEDED without its rank after the time-out (0.11.2, 0.12.0.1), an occupied port a
segmentation fault (0.12.0.1). Here
process 0 listens first, waits for the others, and answers all at once with what it knows; then it
closes the port, and `jax.distributed.initialize` follows. While they wait, they say for whom.
Process 0 sends signs of life, so that the others know whether it is stuck.
"""

import contextlib
import logging
import math
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from jaxspeed.errors import ExitCode, RunError
from jaxspeed.launch.address import Address, Listening, listen
from jaxspeed.launch.admission import (
    Admission,
    Member,
    encoded,
    hello,
    parsed,
    verified_answer,
)

log = logging.getLogger("jaxspeed")
_PAUSE = 0.5  # seconds between attempts to connect
_SILENCE = 30.0  # seconds until a process says what it waits for; then doubled each time
_LONGEST = 65536  # bytes of a line from process 0
_FILES = 512  # open files of process 0 besides a connection from each process, to us and to JAX


def meet(
    coordinator: str, count: int, rank: int, seconds: float, token: str = "", bind: str = ""
) -> str | None:
    """Wait until all processes are there.

    Args:
      token: what all processes of the run have, and no other; "": whoever connects is believed.
      bind: where process 0 listens, if it is not the coordinator's address.

    Returns:
      In process 0 the address at which JAX's service is to listen.

    Raises:
      RunError: some are missing after `seconds`, the port is occupied, or nothing answers there.
    """
    address = Address.parse(coordinator)
    if rank:
        _connect(address, count, rank, seconds, token)
        return None
    with listen(Address.parse(bind) if bind else address) as listening:
        if listening.unconfined and not bind:
            log.warning("process 0 listens on all addresses of this host: %s", listening.unconfined)
        _gather(listening, count, seconds, token)
    return listening.address


def _gather(listening: Listening, count: int, seconds: float, token: str) -> None:
    """Admit all processes, and answer them."""
    _allow_connections(count)
    silence, deadline = _Silence(), time.monotonic() + seconds
    sign_of_life = 0.0  # when the next one is due
    by_rank: dict[int, Member] = {}
    members: list[Member] = []  # also those that have started again since
    problem = ""
    with contextlib.ExitStack() as opened:
        admission = opened.enter_context(Admission(listening.sockets, count, token))
        while len(by_rank) < count - 1 and not problem and time.monotonic() < deadline:
            if time.monotonic() >= sign_of_life:
                sign_of_life = time.monotonic() + _SILENCE / 3
                for admitted in members:
                    admitted.send(None)
            try:
                member = admission.next(min(silence.until, deadline, sign_of_life))
            except RunError as error:
                problem = str(error)
                break
            if member is None:
                if silence.is_over():
                    verdict = f"have not started (limit {seconds:.0f} s)"
                    _say(_missing(count, by_rank, verdict, listening))
                continue
            opened.enter_context(member.peer)
            member.send(None)
            which, before = f"process {member.rank}", by_rank.get(member.rank)
            if member.count != count:
                problem = f"{which} on {member.name} belongs to a run of {member.count} processes"
            elif before is not None and not before.has_left():
                problem = f"{which} was started twice: on {before.name} and on {member.name}"
            by_rank[member.rank] = member
            members.append(member)
        if not problem and len(by_rank) < count - 1:
            verdict = f"did not start within {seconds:.0f} s"
            problem = _missing(count, by_rank, verdict, listening)
        for admitted in members:
            admitted.send(problem)
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


def _missing(count: int, by_rank: Mapping[int, Member], verdict: str, listening: Listening) -> str:
    missing = [rank for rank in range(1, count) if rank not in by_rank]
    hosts = sorted({member.name for member in by_rank.values()} | {socket.gethostname()})
    shown = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    at = listening.unconfined or f"process 0 listens at {', '.join(listening.places())} alone"
    return (
        f"of {count} processes, {len(missing)} {verdict}: {shown}. The others are on "
        f"{', '.join(hosts[:20])}; {at}"
    )


class _Silence:
    """Times at which a waiting process shows what it waits for: less and less often."""

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


def _connect(address: Address, count: int, rank: int, seconds: float, token: str) -> None:
    silence, deadline = _Silence(), time.monotonic() + seconds
    while True:
        try:
            with address.connected(5.0) as peer:
                problem = _answer(peer, address, count, rank, token, seconds, silence, deadline)
            break
        except (OSError, ValueError) as error:
            # Also the end of a process 0 that starts again, or JAX's service of an earlier run.
            why = _unreachable(address, error)
            if time.monotonic() > deadline:
                raise RunError(f"{why} (limit {seconds:.0f} s)") from None
            if silence.is_over():
                _say(f"process {rank}: {why} (limit {seconds:.0f} s)")
        time.sleep(_PAUSE)
    if problem:
        raise RunError(problem)


def _answer(
    peer: socket.socket,
    address: Address,
    count: int,
    rank: int,
    token: str,
    seconds: float,
    silence: "_Silence",
    deadline: float,
) -> str:
    """Say who this process is; process 0's answer: the problem, "" if there is none.

    It may come after the deadline, which is later on a process 0 that has started later; signs of
    life come until then.

    Raises:
      RunError: there is no sign of life at the deadline, or for a while after it.
      OSError, ValueError: the other side is not process 0, or refuses this process.
    """
    why = f"process 0 has accepted the connection to {address}, and does not answer"
    limit = f"(limit {seconds:.0f} s)"
    lines, heard = _Lines(peer), -math.inf
    mine, answers = "", 0
    deadline = max(deadline, time.monotonic() + 1)
    while True:
        try:
            said = parsed(lines.next(min(silence.until, max(deadline, heard + _SILENCE))))
        except TimeoutError:
            now = time.monotonic()
            if now >= max(deadline, heard + _SILENCE):
                raise RunError(f"{why} {limit}: it is stuck, or another program") from None
            if silence.is_over() and now >= heard + _SILENCE:
                _say(f"process {rank}: {why} {limit}")
            continue
        if not mine:
            me = hello(token, str(said.get("number")), rank, count, socket.gethostname())
            peer.sendall(encoded(me))
            mine = me["number"]
            continue
        problem = verified_answer(said, token, mine, answers)
        if problem is not None:
            return problem
        heard, answers = time.monotonic(), answers + 1


def _unreachable(address: Address, error: Exception) -> str:
    """What the failure of the last attempt means, and what often causes it."""
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        why = "nothing listens there: process 0 has not started, or has ended"
    elif isinstance(error, socket.gaierror):
        why = "no host has this name"
    elif isinstance(error, TimeoutError):
        why = "no answer: a firewall, or an address that this host cannot reach"
    elif isinstance(error, ValueError):
        why = f"what answers there is not process 0 of this run: {error}"
    else:
        why = getattr(error, "strerror", None) or str(error)
    hints = []
    if address.is_of_one_host:
        hints.append("the address is this host's own, so it is right only on the host of process 0")
    if proxies := set_proxies():
        hints.append(f"set here: {', '.join(proxies)}; processes connect without a proxy")
    text = f"the coordinator {address} is not reached: {why}"
    return "; ".join([text, *hints])


def set_proxies() -> list[str]:
    """The variables of the environment that name proxies."""
    kinds = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    return sorted(name for name in os.environ if name.lower() in kinds)


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
