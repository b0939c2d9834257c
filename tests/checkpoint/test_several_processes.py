"""Saved and restored by other numbers of processes than one, over Gloo in child processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxspeed.checkpoint import Checkpointer, verify
from tests.checkpoint import states
from tests.support.s3 import BUCKET, Server

ROOT = Path(__file__).resolve().parents[2]
IN_BUCKET = f"s3://{BUCKET}/two"


def together(folder: Path, server: Server, processes: int = 2, devices: int = 4) -> list[str]:
    """What each process printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.checkpoint.processes", str(folder), str(port)]
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(processes)],
            cwd=ROOT,
            env={
                **os.environ,
                **server.environment,
                "XLA_FLAGS": " ".join(flags),
                "TEST_BUCKET": IN_BUCKET,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [run.communicate(timeout=180) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, (_, err) in zip(runs, said, strict=True):
        assert run.returncode == 0, err[-3000:]
    return [out for out, _ in said]


def values_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(folder, an engine that saved there after three steps and took five more)."""
    folder = tmp_path_factory.mktemp("one")
    engine = states.engine(stage=3)
    states.steps(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"from": 1})
    np.savez(folder / "at-the-save.npz", **states.held(engine))
    engine.wait()
    states.steps(engine, 3, 5)
    return folder, engine


@pytest.fixture(scope="module")
def two_processes(one_process, s3_server):
    """(the folder after two processes restored it, checked it, went on and saved again, what each
    printed). They pass over a damaged checkpoint too, and fail together to save."""
    folder, _ = one_process
    s3_server.clear()
    said = together(folder, s3_server)
    assert ["same" in out for out in said] == [True, True], said
    return folder, said


@pytest.mark.sampled
def test_two_processes_take_what_one_saved_and_go_on_as_it_did(one_process, two_processes):
    """Each compares all that it holds with what was saved, and trains five steps more."""
    found = values_of(two_processes[0] / "after-0.npz")
    for name, value in states.held(one_process[1]).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_one_process_takes_what_two_saved(two_processes):
    folder, _ = two_processes
    assert verify(folder) == []
    assert (folder / "two" / "arrays" / "ocdbt.process_1").is_dir()
    engine = states.engine(stage=1, devices=1)
    restored = Checkpointer(folder).restore(engine.program)
    assert (restored.tag, restored.client_state) == ("two", {"from": 2})
    engine.state = restored.state
    found, expected = states.held(engine), values_of(folder / "after-0.npz")
    states.assert_same(found, expected)


def test_one_process_takes_what_two_saved_in_a_bucket(two_processes, s3_server, monkeypatch):
    folder, said = two_processes
    assert all("same in the bucket" in out for out in said)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    assert verify(IN_BUCKET) == []
    assert any("/ocdbt.process_1/d/" in name for name in s3_server.objects())
    engine = states.engine(stage=1, devices=1)
    engine.state = Checkpointer(IN_BUCKET).restore(engine.program).state
    states.assert_same(states.held(engine), values_of(folder / "after-0.npz"))


def test_two_processes_pass_over_a_damaged_checkpoint_together(two_processes):
    assert all("took the one before the damaged one" in out for out in two_processes[1])


def test_processes_that_fail_or_disagree_raise_the_same_error(two_processes):
    said = two_processes[1]
    assert all("different tags: ['tag-0', 'tag-1']" in out for out in said)
    assert all("process 1" in out or "injected" in out for out in said), said


@pytest.mark.parametrize("method", ["create", "array", "finish"])
@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_an_error_of_the_process_that_writes_reaches_all(two_processes, what, method):
    """Before the values are gathered, while they are, or after that."""
    for out in two_processes[1]:
        (line,) = [line for line in out.splitlines() if line.startswith(f"{what} {method}: ")]
        assert "No space left on device" in line
