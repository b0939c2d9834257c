"""Who is not of the run: process 0 refuses it, says so once, and goes on waiting."""

import contextlib
import os
import socket
import threading
import time

import pytest

from jaxspeed.errors import RunError
from jaxspeed.launch import address, admission
from jaxspeed.launch.address import Address, listen
from jaxspeed.launch.admission import answer, encoded, hello, parsed
from jaxspeed.launch.rendezvous import meet
from tests.support.processes import free_port

pytestmark = pytest.mark.fast

TOKEN = "a token that nobody else has"


class Met(threading.Thread):
    """One process that meets the others, as a thread; `problem` is what it raises."""

    def __init__(self, where, rank, count=3, seconds=20.0, token=TOKEN):
        super().__init__(daemon=True)
        self.given, self.problem = (where, count, rank, seconds, token), "still waits"
        self.start()

    def run(self):
        try:
            meet(*self.given)
            self.problem = ""
        except RunError as error:
            self.problem = str(error)


def connected(port, source="127.0.0.1"):
    """A connection to process 0, and the number that it sends."""
    until = time.monotonic() + 10
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
            return peer, parsed(peer.makefile("rb").readline())["number"]
        except ConnectionRefusedError:
            assert time.monotonic() < until


def said_by(number, token=TOKEN, rank=1, count=3, **changes):
    return encoded(hello(token, number, rank, count, "h") | changes)


# What is sent, and why it is refused.
REFUSED = {
    "a long line": (lambda n: b"a" * 4097, "its line is longer than 4096 bytes"),
    "a long line with an end": (lambda n: b"a" * 4097 + b"\n", "its line is longer than 4096"),
    "infinity": (lambda n: b'{"rank": Infinity, "count": 3}\n', "its line is not JSON"),
    "not a number": (lambda n: b'{"rank": NaN, "count": 3}\n', "its line is not JSON"),
    "deep nesting": (lambda n: b"[" * 2040 + b"]" * 2040 + b"\n", "its line is n"),
    "bytes": (lambda n: bytes(range(128, 256)) + b"\n", "its line is not JSON"),
    "a list": (lambda n: b"[1, 2]\n", "its line is not an object"),
    "nothing known": (lambda n: b"{}\n", "its line does not say rank"),
    "a boolean": (lambda n: said_by(n, rank=True), "its line does not say rank"),
    "a word": (lambda n: said_by(n, rank="1"), "its line does not say rank"),
    "a large rank": (lambda n: said_by(n, rank=3), "its rank, 3, is not one of 1 to 2"),
    "a huge rank": (lambda n: said_by(n, rank=10**3000), "its rank, 1000"),
    "a negative rank": (lambda n: said_by(n, rank=-1), "its rank, -1, is not one of"),
    "process 0 again": (lambda n: said_by(n, rank=0), "its rank, 0, is not one of"),
    "no token": (lambda n: said_by(n, token=""), "it does not have the token of this run"),
    "another token": (lambda n: said_by(n, token="b"), "it does not have the token"),
    "no proof": (lambda n: said_by(n, proof=None), "it does not have the token"),
    "a surrogate": (lambda n: said_by(n, proof="\ud800"), "it does not have the token"),
    "an old proof": (lambda n: said_by("7"), "it does not have the token of this run"),
    "the end": (lambda n: b"", "it closed the connection before it said who it is"),
}


def test_what_is_not_of_the_run_is_refused_and_the_run_starts(monkeypatch, caplog):
    monkeypatch.setattr(admission, "_REPORTED", 100)
    port = free_port()
    first = Met(f"127.0.0.1:{port}", 0)
    for place, (name, (sent, why)) in enumerate(REFUSED.items()):
        peer, number = connected(port, f"127.0.1.{place}")
        with peer:
            peer.sendall(sent(number))
            if name == "the end":
                peer.shutdown(socket.SHUT_WR)
            told = parsed(peer.makefile("rb").readline())["refused"]
        assert told.startswith(why), name
    others = [Met(f"127.0.0.1:{port}", rank) for rank in (1, 2)]
    for each in (first, *others):
        each.join(20)
        assert each.problem == ""
    for place, (_, why) in enumerate(REFUSED.values()):
        assert f"process 0 refused a connection from 127.0.1.{place}: {why}" in caplog.text


def test_a_rank_is_part_of_what_is_proved():
    port = free_port()
    first = Met(f"127.0.0.1:{port}", 0, seconds=1.0)
    peer, number = connected(port)
    with peer:
        peer.sendall(encoded(hello(TOKEN, number, 1, 3, "h") | {"rank": 2}))
        assert "token" in parsed(peer.makefile("rb").readline())["refused"]
    first.join(20)
    assert "2 did not start within 1 s: 1, 2" in first.problem


def test_slow_and_silent_connections_neither_delay_nor_exclude_the_runs(caplog):
    """More of them than wait at once: the oldest are refused."""
    port = free_port()
    first = Met(f"127.0.0.1:{port}", 0)
    with contextlib.ExitStack() as opened:
        for place in range(150):
            peer, _ = connected(port)
            opened.enter_context(peer)
            peer.sendall(b"{" * (place % 2))
        began = time.monotonic()
        others = [Met(f"127.0.0.1:{port}", rank) for rank in (1, 2)]
        for each in (first, *others):
            each.join(20)
            assert each.problem == ""
        assert time.monotonic() - began < admission._HELLO / 2
    assert caplog.text.count("too many connect, and do not say who they are") == 1


def test_one_that_says_nothing_is_refused_in_time(monkeypatch, caplog):
    monkeypatch.setattr(admission, "_HELLO", 0.3)
    port = free_port()
    first = Met(f"127.0.0.1:{port}", 0, seconds=2.0)
    peer, _ = connected(port)
    with peer:
        said = peer.makefile("rb").readlines()  # until process 0 closes it
    assert parsed(said[-1])["refused"].startswith("it did not say who it is within")
    assert first.is_alive()
    first.join(20)


def test_refusals_are_reported_once_an_address_and_not_without_end(caplog):
    port = free_port()
    first = Met(f"127.0.0.1:{port}", 0, seconds=2.0)
    for place in range(60):
        peer, _ = connected(port, f"127.0.1.{place // 2}")
        with peer:
            peer.sendall(b"x\n")
            peer.makefile("rb").readline()
    first.join(20)
    assert caplog.text.count("refused a connection from") == 8
    assert caplog.text.count("127.0.1.3: ") == 1
    assert caplog.text.count("process 0 refused further connections, which are not rep") == 1


def test_what_others_say_is_shown_without_control_characters():
    port = free_port()
    first = Met(f"127.0.0.1:{port}", 0, count=2, token="")
    peer, number = connected(port)
    with peer:
        peer.sendall(encoded(hello("", number, 1, 4, "\x1b]0;a\x07" + "b" * 1000)))
        first.join(20)
    assert "process 1 on ?]0;a?bbb" in first.problem and len(first.problem) < 400


# -- a program that listens on the port before process 0 ----------------------------------------


class Other(threading.Thread):
    """What is not process 0: it sends a number, and then these lines; it keeps the answers."""

    def __init__(self, *lines):
        super().__init__(daemon=True)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port, self.lines, self.heard = self.server.getsockname()[1], lines, []
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.server.accept()
                with peer, contextlib.suppress(OSError):
                    peer.sendall(encoded({"number": "7"}))
                    self.heard.append(peer.makefile("rb").readline())
                    for line in self.lines:
                        peer.sendall(line(parsed(self.heard[-1])))
                        time.sleep(0.05)


@pytest.mark.parametrize(
    "lines",
    [
        [lambda said: encoded({"problem": "", "proof": ""})],
        [lambda said: encoded(answer("", said["number"], 0, ""))],
        [lambda said: encoded(answer("", said["number"], 0, "process 0 has a problem"))],
        [lambda said, i=i: encoded(answer("", said["number"], i, None)) for i in range(400)],
        [lambda said: encoded({"refused": "go \x1b[31maway"})],
        [lambda said: b"[" * 60_000 + b"\n"],
        [lambda said: b"a" * 100_000],
    ],
    ids=["no proof", "done", "a problem", "signs of life", "a refusal", "nested", "long"],
)
def test_one_that_is_not_process_0_learns_no_token_and_is_not_believed(lines):
    other = Other(*lines)
    began = time.monotonic()
    process = Met(f"127.0.0.1:{other.port}", 1, seconds=1.0)
    process.join(20)
    other.server.close()
    assert time.monotonic() - began < 8
    assert "what answers there is not process 0 of this run: " in process.problem
    assert "\x1b" not in process.problem
    assert other.heard and not any(TOKEN.encode() in line for line in other.heard)


# -- where process 0 listens --------------------------------------------------------------------


def places(text):
    with listen(Address.parse(text)) as listening:
        return set(listening.places()), listening


def test_process_0_listens_at_the_coordinators_address_alone():
    port = free_port()
    found, listening = places(f"127.0.0.1:{port}")
    assert (found, listening.address) == ({"127.0.0.1"}, f"127.0.0.1:{port}")
    found, _ = places(f"localhost:{port}")
    assert found <= {"127.0.0.1", "::1"} and found
    found, listening = places(f"0.0.0.0:{port}")
    assert found == {"0.0.0.0"} and not listening.unconfined


@pytest.mark.parametrize(
    ("host", "resolved", "why"),
    [
        ("192.0.2.1", "192.0.2.1", "the coordinator's address, 192.0.2.1, is not one of"),
        ("node-7", "127.0.1.1", "the coordinator's name, node-7, is a loopback address here"),
        ("no-such-host.invalid", None, "the coordinator's name, no-such-host.invalid, is not"),
    ],
)
def test_where_the_name_is_ambiguous_it_listens_on_all_and_says_why(
    monkeypatch, host, resolved, why
):
    def resolve(*_, **__):
        if resolved is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, port))]

    port = free_port()
    monkeypatch.setattr(address.socket, "getaddrinfo", resolve)
    found, listening = places(f"{host}:{port}")
    assert found <= {"::", "0.0.0.0"} and listening.address == f"[::]:{port}"
    assert listening.unconfined.startswith(why)


def test_a_socket_of_a_process_that_was_killed_is_used_again_and_one_in_use_is_not(tmp_path):
    path = tmp_path / "coordinator"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    found, listening = places(f"unix:{path}")
    assert found == {str(path)} and listening.address == f"unix:{path}"
    assert not path.exists()  # JAX makes its own there
    with listen(Address.parse(f"unix:{path}")), pytest.raises(RunError, match="in use"):
        listen(Address.parse(f"unix:{path}"))
    path.unlink(missing_ok=True)
    path.write_text("a file of somebody")
    with pytest.raises(RunError, match="in use"):
        listen(Address.parse(f"unix:{path}"))
    assert path.read_text() == "a file of somebody"


@pytest.mark.parametrize("text", ["host", ":1", "host:", "host:port", "host:70000", "unix:"])
def test_what_is_no_address_is_named(text):
    with pytest.raises(RunError, match="needs HOST:PORT"):
        Address.parse(text)


def test_processes_meet_at_a_socket_and_others_are_named_by_process_and_user(tmp_path, caplog):
    path = tmp_path / "coordinator"
    processes = [Met(f"unix:{path}", rank) for rank in (0, 1)]
    until, peer = time.monotonic() + 10, None
    while peer is None:
        try:
            peer = Address("", path=str(path)).connected(10)
        except OSError:  # it does not listen yet
            assert time.monotonic() < until
            time.sleep(0.01)
    with peer:
        peer.sendall(b"x\n")
        assert "refused" in peer.makefile().read()
    processes.append(Met(f"unix:{path}", 2))
    for each in processes:
        each.join(20)
        assert each.problem == ""
    assert f"from process {os.getpid()} of user {os.getuid()}: its line is" in caplog.text
