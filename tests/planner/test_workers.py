"""Worker processes of a search: concurrent answers, and an end with their parent."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from jaxspeed.errors import RunError
from jaxspeed.planner.compile.workers import Inline, Workers
from tests.planner.answers import Doubling


def started(count=2):
    return Workers(pickle.dumps(Doubling()), count, {"JAX_PLATFORMS": "cpu"})


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def gone(pids, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.1)
    return False


def test_requests_are_answered_by_workers_and_errors_raised_here():
    with started() as workers:
        answers = [workers.submit(n) for n in range(6)]
        wrong = workers.submit("no")
        assert [future.result(60)[0] for future in answers] == [0, 2, 4, 6, 8, 10]
        pids = {future.result()[1] for future in answers}
        assert os.getpid() not in pids and 1 <= len(pids) <= 2
        with pytest.raises(ValueError, match="no"):
            wrong.result(60)
        assert workers.submit(4).result(60)[0] == 8  # and it goes on
    assert gone(pids)


def test_a_process_that_ends_is_reported():
    with started(1) as workers, pytest.raises(RunError, match=r"ended \(exit code 3\)"):
        workers.submit("die").result(60)


def test_one_that_is_killed_is_reported_as_killed():
    said = "probably because this machine ran out of memory"
    with started(1) as workers, pytest.raises(RunError, match=said):
        workers.submit("be killed").result(60)


@pytest.mark.full  # below, with their parent, some are at work
def test_one_that_works_is_ended_too():
    with started(1) as workers:
        pid = workers.submit(1).result(60)[1]
        workers.submit("wait")
        time.sleep(0.3)
    assert gone([pid])


ASKS = """
import pickle, signal, sys, time
from jaxspeed.planner.compile.workers import Workers
from tests.planner.answers import Doubling
# A shell has commands in the background ignore it, and what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
workers = Workers(pickle.dumps(Doubling()), 1, {})
pids = {workers.submit(n).result(60)[1] for n in range(2)}
workers.submit("wait")
print(*pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_workers_end_with_their_parent_however_it_ends(how):
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert asking.stdout is not None
    pids = [int(pid) for pid in asking.stdout.readline().split()]
    assert pids and all(map(alive, pids))
    asking.send_signal(how)
    asking.wait(60)
    assert gone(pids)


def test_in_process_results_and_errors_are_the_same():
    with Inline(Doubling()()) as here:
        assert here.submit(4).result()[0] == 8
        with pytest.raises(ValueError, match="no"):
            here.submit("no").result()
