"""One of several processes dies, stops or blocks: all end soon, and say which one and where."""

import subprocess
import sys
import time

import pytest

from jaxspeed.errors import ExitCode
from tests.run.watched import SILENCE, STEP
from tests.support import processes

BOUND = 60.0  # seconds after the time-out of a section


def ended(folder, count, rank, fault):
    """(exit codes, output, seconds from the fault to the last end) of the light processes."""
    faults = [fault if rank == i else "" for i in range(count)]
    group = processes.start(folder, count, "tests.run.watched", faults=faults)
    try:
        deadline = time.monotonic() + 200
        while "fault:" not in group.said(rank):
            assert time.monotonic() < deadline, group.said(rank)
            time.sleep(0.02)
        began = time.monotonic()
        others = [run for i, run in enumerate(group.runs) if i != rank]
        codes = [run.wait(120) for run in others]
        seconds = time.monotonic() - began
    finally:
        group.end()  # one that is stopped does not end by itself
    codes.insert(rank, group.runs[rank].returncode)
    return codes, [group.said(i) for i in range(count)], seconds


CASES = [
    ("compile:kill", 0, "compile", 0.0),
    ("step:fail:3", 1, "step", 0.0),
    ("step:block:3", 1, "step", STEP),
    ("save:stop", 1, "save", SILENCE),
]
MORE = [
    ("step:kill:3", 1, "step", 0.0),
    ("step:stop:2", 0, "step", SILENCE),
    ("step:block:1", 0, "step", STEP),
    ("compile:block", 2, "compile", STEP),
    ("compile:stop", 1, "compile", SILENCE),
    ("save:block", 1, "save", STEP),
    ("save:kill", 2, "save", 0.0),
    ("save:fail", 0, "save", 0.0),
    ("step:kill:7", 0, "step", 0.0),
]


@pytest.mark.default_cases("step:fail:3-1-step-0.0")
@pytest.mark.parametrize(
    ("fault", "rank", "section", "time_out"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_all_end_within_the_bound_and_name_the_process(tmp_path, fault, rank, section, time_out):
    count = 2 if (fault, rank, section, time_out) in CASES else 4
    codes, said, seconds = ended(tmp_path, count, rank, fault)
    print(f"{fault} in process {rank} of {count}: all ended after {seconds:.1f} s")
    assert seconds < time_out + BOUND
    kind = fault.split(":")[1]
    for other in set(range(count)) - {rank}:
        assert codes[other] == ExitCode.PEER, said[other]
        line = next(line for line in said[other].splitlines() if line.startswith("jaxspeed: pro"))
        assert line.startswith(f"jaxspeed: process {rank} on "), line
        assert f"in {section}" in line, line
        assert ("a fault of the user's" in line) == (kind == "fail")
        assert ("stacks of process" in said[other]) == (kind in ("stop", "block"))
    if kind == "block":
        assert codes[rank] == ExitCode.HANG
        assert "in block" in said[rank]  # its own stack shows where
    if kind == "fail":
        assert codes[rank] == ExitCode.CRASH and "Traceback" in said[rank]


ABORTED = """
import os
from types import SimpleNamespace
from jaxspeed.run.ending import Ending, fault_of

beats = SimpleNamespace(rank=1, say=lambda subject, value: os.abort())
ending = Ending(beats, os._exit)
ending.name_process_0_at_abort(dict)
ending.end(fault_of({rank}, None, "stuck", "stuck for 8 s"))
"""


@pytest.mark.default_cases("1-4")
@pytest.mark.parametrize(("rank", "code"), [(1, ExitCode.HANG), (2, ExitCode.PEER)])
def test_jax_aborts_a_process_that_is_about_to_end(rank, code):
    """Process 0 ends as soon as all have said that they leave; JAX then aborts the others."""
    source = ABORTED.format(rank=rank)
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == code, run.stderr
    assert f"process {rank}: stuck for 8 s" in run.stderr


@pytest.mark.full
def test_a_difference_between_the_processes_is_shown_by_all(tmp_path):
    group = processes.start(tmp_path, 3, "tests.run.watched", TEST_SEED_2="5")
    assert group.codes() == [ExitCode.CONFIG] * 3
    for rank in range(3):
        assert 'config run.seed: "5" in process 2 (' in group.said(rank)


@pytest.mark.full
def test_processes_that_end_are_no_fault(tmp_path):
    group = processes.start(tmp_path, 3, "tests.run.watched")
    assert group.codes() == [0, 0, 0]
    assert all("done" in group.said(rank) for rank in range(3))
