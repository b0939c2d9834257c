"""A process of a user's own loop blocks: all end within the bound, and name it and its section."""

import json
import re
import subprocess
import sys
import time

import pytest

from jaxspeed.errors import ExitCode
from tests.run import small
from tests.run.own_loop import LIMITS

BOUND = 30.0  # seconds after the time-out of a section, on a slow machine


def started(folder, count, config, **environment):
    launch = small.command("launch", "--processes", count, "--devices-per-process", 1)
    words = [*launch, "--all-output", "--no-core-binding", "--", sys.executable, "-m"]
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


def blocked(folder, place, config, rank, count=3):
    """(exit code of the launcher, output after the fault, seconds from it to the end)."""
    child = started(folder, count, config, TEST_RANK=str(rank), TEST_PLACE=place)
    try:
        before = []
        while "blocks" not in (before or [""])[-1]:
            before.append(child.stdout.readline())
            assert before[-1], "".join(before)[-4000:]
        began = time.monotonic()
        said = child.communicate(timeout=120)[0]
    finally:
        child.kill()
    return child.returncode, said, time.monotonic() - began


PIPELINE = {"mesh": {"pipe": 3}, "train_micro_batch_size_per_gpu": 2}
PIPELINE |= {"gradient_accumulation_steps": 3}


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
    code, said, seconds = blocked(tmp_path, place, config, rank)
    print(f"{place} of process {rank}: all ended after {seconds:.1f} s")
    assert seconds < LIMITS[of] + BOUND, said[-4000:]
    assert code in (ExitCode.HANG, ExitCode.PEER), said[-4000:]
    named = rf"process {rank} on \S+, in {section}: stuck for \d+ s; the time-out of "
    named += rf"run\.watchdog\.{of} is {LIMITS[of]:.0f} s"
    for other in range(3):
        assert re.search(rf"(?m)^\[{other}\] jaxspeed: {named}$", said), said[-4000:]
    assert re.search(named, said.splitlines()[-1]), said.splitlines()[-1]


@pytest.mark.full
def test_a_loop_that_no_process_blocks_is_left_alone(tmp_path):
    child = started(tmp_path, 3, {})
    said = child.communicate(timeout=300)[0]
    assert child.returncode == 0 and said.count("done") == 3, said[-4000:]
