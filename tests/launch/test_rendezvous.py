"""Processes that meet before JAX starts, as threads: what is wrong is named within the time-out."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxspeed.errors import RunError
from jaxspeed.launch import admission, rendezvous
from jaxspeed.launch.admission import answer, encoded, parsed
from jaxspeed.launch.rendezvous import meet
from jaxspeed.run import same_run
from tests.support.processes import free_port

pytestmark = pytest.mark.fast


def met(port, count, ranks, seconds=1.0, delay=0.0, host="127.0.0.1", token=""):
    """What each rank raises, by rank; process 0 comes later."""
    found = {}

    def one(rank):
        if rank == 0:
            time.sleep(delay)
        try:
            meet(f"{host}:{port}", count, rank, seconds, token)
            found[rank] = None
        except RunError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_meet_whoever_comes_first_and_the_port_is_free_for_jax():
    port = free_port()
    for _ in range(2):  # at once again, as a restarted run
        assert met(port, 4, range(4), seconds=20, delay=0.7) == dict.fromkeys(range(4))
    with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True):
        pass


def test_more_processes_meet_than_files_were_allowed(monkeypatch, caplog):
    """Process 0 has a connection to each."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, limits[1]))
    try:
        assert set(met(free_port(), 60, range(60), seconds=20).values()) == {None}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(rendezvous.resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(rendezvous.resource, "setrlimit", lambda _, given: limited.append(given))
    limited = []
    rendezvous._allow_connections(10_000)
    assert limited == [(4096, 4096)]
    assert "may open 4096 files, and 10000 processes connect" in caplog.text


def test_processes_that_never_start_are_named_on_all_that_did():
    found = met(free_port(), 5, (0, 2, 4))
    assert set(found) == {0, 2, 4}
    for text in found.values():
        assert "of 5 processes, 2 did not start within 1 s: 1, 3." in text
        assert f"The others are on {socket.gethostname()}" in text
        assert text.endswith("; process 0 listens at 127.0.0.1 alone")


def test_a_closed_port_and_a_loopback_address_are_named(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    port = free_port()
    text = met(port, 2, (1,))[1]
    assert text.startswith(f"the coordinator 127.0.0.1:{port} is not reached: nothing listens ")
    assert text.endswith("(limit 1 s)")
    assert "right only on the host of process 0" in text
    assert "set here: HTTPS_PROXY" in text


def test_a_wrong_coordinator_is_named():
    assert "no host has this name" in met(1234, 2, (1,), host="no-such-host.invalid")[1]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    peer.close()

        threading.Thread(target=greet, daemon=True).start()
        text = met(server.getsockname()[1], 2, (1,))[1]
    assert "not process 0 of this run" in text or "reset" in text


def test_process_0_on_another_host_than_the_coordinators_is_named():
    text = met(free_port(), 2, (0,), host="192.0.2.1")[0]
    assert f"address, 192.0.2.1, is not one of {socket.gethostname()}" in text
    assert "address" not in met(free_port(), 2, (0,))[0]


def test_a_wait_is_explained_before_its_end(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.2)
    port = free_port()
    found = met(port, 3, (0, 1), seconds=2.0, delay=1.0)
    assert "did not start within 2 s: 2" in found[0]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        f"waiting: process 1: the coordinator 127.0.0.1:{port} is not reached"
    )
    assert any(
        line.startswith("waiting: of 3 processes, 1 have not started (limit 2 s): 2.")
        for line in said
    )
    assert len(said) <= 6  # less and less often


@pytest.mark.parametrize("sent", [b"", b'{"number": "7"}\n'], ids=["never", "after its number"])
def test_a_process_0_that_accepts_and_does_not_answer_is_named_within_the_limit(
    monkeypatch, capsys, sent
):
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.3)
    held = []

    def accept_one():
        held.append(server.accept()[0])
        held[0].sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port, began = server.getsockname()[1], time.monotonic()
        threading.Thread(target=accept_one, daemon=True).start()
        text = met(port, 2, (1,), seconds=1.0)[1]
        took = time.monotonic() - began
        held[0].close()
    why = f"process 0 has accepted the connection to 127.0.0.1:{port}, and does not answer"
    assert text == f"{why} (limit 1 s): it is stuck, or another program"
    assert 1 <= took < 3
    assert capsys.readouterr().err.splitlines()[0] == f"waiting: process 1: {why} (limit 1 s)"


def test_a_process_0_that_lives_is_awaited_beyond_the_limit_of_one_that_started_before_it(
    monkeypatch, capsys
):
    """It names who is missing, when its own limit is over."""
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.3)
    found = met(free_port(), 3, (0, 1), seconds=2.0, delay=1.5)
    assert "did not start within 2 s: 2" in found[1] and found[1] == found[0]
    assert "does not answer" not in capsys.readouterr().err


def test_a_process_that_connects_and_says_nothing_does_not_extend_the_limit(monkeypatch):
    monkeypatch.setattr(admission, "_HELLO", 0.5)
    port, done = free_port(), threading.Event()

    def slow():
        """A byte at a time."""
        while not done.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as it:
                while not done.wait(0.1):
                    it.sendall(b"[")

    thread = threading.Thread(target=slow)
    thread.start()
    began = time.monotonic()
    found = met(port, 3, (0, 1), seconds=2.0)
    took = time.monotonic() - began
    done.set()
    thread.join()
    assert "did not start within 2 s: 2" in found[0] == found[1] and took < 4


def test_more_processes_than_open_files_are_allowed():
    """A limit is for a process: this test's body is one."""
    code = """
import resource, socket, threading
from jaxspeed.launch.admission import encoded, hello, parsed
from tests.launch.test_rendezvous import meet, free_port
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
port, peers = free_port(), []
server = threading.Thread(target=meet, args=(f"127.0.0.1:{port}", 101, 0, 20.0))
server.start()
while not peers:
    try: peers.append(socket.create_connection(("127.0.0.1", port)))
    except ConnectionRefusedError: pass
peers += [socket.create_connection(("127.0.0.1", port)) for _ in range(99)]
lines = [peer.makefile("rb") for peer in peers]
for rank, peer in enumerate(peers, 1):
    number = parsed(lines[rank - 1].readline())["number"]
    peer.sendall(encoded(hello("", number, rank, 101, "h")))
assert all(parsed(each.readlines()[-1])["problem"] == "" for each in lines)
server.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_occupied_port_is_named_at_once():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        began = time.monotonic()
        text = met(port, 2, (0,), seconds=60)[0]
    assert time.monotonic() - began < 10
    assert text.startswith(f"port {port} on {socket.gethostname()}") and "in use" in text


def test_a_rank_that_is_started_twice_is_named():
    found = {}
    port = free_port()

    def one(name, rank):
        try:
            meet(f"127.0.0.1:{port}", 3, rank, 5.0)
        except RunError as error:
            found[name] = str(error)

    threads = [threading.Thread(target=one, args=pair) for pair in (("a", 0), ("b", 1), ("c", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(found) == {"a", "b", "c"}
    assert all("process 1 was started twice" in text for text in found.values())


STUCK = """
from jaxspeed.launch import environment, rendezvous
rendezvous._SILENCE = 1.0
environment.start_processes(3.0)
"""


def test_a_process_0_that_is_stuck_before_it_serves_jax_is_named_within_the_limit():
    """It has answered here, and then keeps the port without JAX's service."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_PLATFORMS": "cpu"}
        environment = os.environ | place | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
        child = subprocess.Popen(
            [sys.executable, "-c", STUCK], stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            server.settimeout(60)
            with server.accept()[0] as peer:
                began = time.monotonic()
                peer.sendall(encoded({"number": "7"}))
                said = parsed(peer.makefile("rb").readline())
                peer.sendall(encoded(answer("", said["number"], 0, "")))
            said = child.communicate(timeout=30)[1].splitlines()
        finally:
            child.kill()
            child.wait()
    took = time.monotonic() - began
    assert child.returncode == 1 and 2 < took < 20, (said, took)
    what = "process 1 of 2 (from JAX_NUM_PROCESSES): all have met, and not all have joined JAX's"
    assert said[0] == f"waiting: {what} service (limit 3 s)"
    assert said[-1] == f"jaxspeed: {what} service (limit 3 s)" and len(said) <= 4


@pytest.mark.parametrize("has_a_watchdog", [True, False])
def test_a_process_0_that_does_not_compare_configs_is_waited_for_with_a_message(
    monkeypatch, capsys, has_a_watchdog
):
    """To the limit, and a little longer if its watchdog lives, which names what is stuck."""
    waited = []

    class Beats:
        rank, count = 1, 2

        def of(self, rank):
            return {"section": "start"} if has_a_watchdog else None

        def answered(self, what, seconds):
            waited.append(round(seconds))
            time.sleep(0.5)
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    watchdog = SimpleNamespace(
        beats=Beats(),
        met=False,
        host="here",
        period=2.0,
        will_meet=lambda: None,
        sections=SimpleNamespace(limit=lambda section: 35.0),
    )
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.1)
    with pytest.raises(RunError, match="process 0 has not answered for 35 s"):
        same_run.meet(watchdog, {})
    assert waited == [41 if has_a_watchdog else 35]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "waiting: process 1: not all processes have compared their configs with process 0's "
        "(limit 35 s)"
    )
    time.sleep(0.3)
    assert not capsys.readouterr().err  # it has ended
