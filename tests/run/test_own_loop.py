"""A process of a user's own loop blocks: all end within the bound, and name it and its section."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxspeed.errors import ExitCode
from tests.run import small
from tests.run.own_loop import LIMITS

BOUND = 30.0  # seconds after the time-out of a section, on a slow machine


def started(folder, count, config, options=(), devices=1, **environment):
    launch = small.command("launch", "--processes", count, "--devices-per-process", devices)
    words = [*launch, *options, "--all-output", "--no-core-binding", "--", sys.executable, "-m"]
    words += ["tests.run.own_loop", folder, json.dumps(config)]
    return subprocess.Popen(
        [*map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**without_devices(small.environment()), **environment},
    )


def without_devices(environment):
    return {k: v for k, v in environment.items() if k != "JAX_NUM_CPU_DEVICES"}


@contextlib.contextmanager
def blocked(folder, place, config, rank, count=3, **more):
    """The launcher of processes of which one has just blocked, and when."""
    child = started(folder, count, config, TEST_RANK=str(rank), TEST_PLACE=place, **more)
    try:
        before = [""]
        while "blocks" not in before[-1]:
            before.append(child.stdout.readline())
            assert before[-1], "".join(before)[-4000:]
        yield child, time.monotonic()
    finally:
        child.kill()


PIPELINE = {"mesh": {"pipe": 3}, "train_micro_batch_size_per_gpu": 2}
PIPELINE |= {"gradient_accumulation_steps": 3}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "rank", "section", "of", "config"),
    [
        ("user code", 1, "user code after step 3", "user_code", {}),
        ("train_batch", 2, "step 4", "step", {}),
        pytest.param(
            "user code", 0, "user code after step 3", "user_code", {}, marks=pytest.mark.full
        ),
        pytest.param(
            "eval_batch", 1, "evaluate after step 4", "evaluate", {}, marks=pytest.mark.full
        ),
        pytest.param("save_checkpoint", 0, "save after step 4", "save", {}, marks=pytest.mark.full),
        pytest.param("train_batch", 1, "step 4", "step", PIPELINE, marks=pytest.mark.full),
    ],
)
def test_all_end_within_the_bound_and_name_the_process(tmp_path, place, rank, section, of, config):
    with blocked(tmp_path, place, config, rank) as (child, began):
        said = child.communicate(timeout=120)[0]
    seconds = time.monotonic() - began
    print(f"{place} of process {rank}: all ended after {seconds:.1f} s")
    assert seconds < LIMITS[of] + BOUND, said[-4000:]
    assert child.returncode in (ExitCode.HANG, ExitCode.PEER), said[-4000:]
    named = rf"process {rank} on \S+, in {section}: stuck for \d+ s; the time-out of "
    named += rf"run\.watchdog\.{of} is {LIMITS[of]:.0f} s"
    for other in range(3):
        assert re.search(rf"(?m)^\[{other}\] jaxspeed: {named}$", said), said[-4000:]
    assert re.search(named, said.splitlines()[-1]), said.splitlines()[-1]


@pytest.mark.full
def test_a_loop_of_one_process_is_watched_if_the_config_says_so(tmp_path):
    """Over a parameter server."""
    config = {"mesh": {"data": 2}, "parallel": {"data_reduction": "parameter_server", "servers": 1}}
    config["run"] = {"watchdog": {**LIMITS, "enabled": True}}
    with blocked(tmp_path, "train_batch", config, 0, count=1, devices=3) as (child, began):
        said = child.communicate(timeout=120)[0]
    assert time.monotonic() - began < LIMITS["step"] + BOUND
    assert child.returncode == ExitCode.HANG
    assert re.search(r"process 0 on \S+, in step 4: stuck for ", said.splitlines()[-1]), said


@pytest.mark.full
def test_a_request_to_stop_ends_a_loop_that_is_blocked_without_a_limit(tmp_path):
    """JAX catches SIGTERM, so the processes do not end by it."""
    with blocked(tmp_path, "user code", {"run": {}}, 1, options=("--grace", "2")) as (child, began):
        time.sleep(6)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=120)[0]
    assert time.monotonic() - began < 6 + 2 + BOUND and child.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; killed after 2 s (--grace): rank 0, 1, 2" in said.splitlines()[-1]


@pytest.mark.full
def test_a_loop_that_no_process_blocks_is_left_alone(tmp_path):
    child = started(tmp_path, 3, {})
    said = child.communicate(timeout=300)[0]
    assert child.returncode == 0 and said.count("done") == 3, said[-4000:]
