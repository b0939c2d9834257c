"""kill -9 at any moment of a run with state on a disk: it resumes, and ends with the same bits."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def started(folder, steps):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.disk.child", str(folder), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finished(folder, steps):
    child = started(folder, steps)
    child.communicate(timeout=500)
    assert child.returncode == 0
    with np.load(folder / "values.npz") as values:
        return [values[name] for name in values.files]


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("kills", [1, 3, pytest.param(20, marks=pytest.mark.full)])
def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path, kills):
    steps = 3 * kills + 6
    expected = finished(tmp_path / "undisturbed", steps)
    folder, rng = tmp_path / "killed", random.Random(kills)
    for _ in range(kills):
        child = started(folder, steps)
        assert child.stdout.readline() == "ready\n"
        child.stdout.readline()  # a step
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len([*(folder / "disk").iterdir()]) == 1  # what was left before it is removed
    values = finished(folder, steps)
    for ours, theirs in zip(values, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not [*(folder / "disk").iterdir()]
