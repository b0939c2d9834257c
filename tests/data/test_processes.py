"""Several processes, each with its own devices, feed one global batch."""

import json
import os
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from jaxspeed.data.split import Split
from tests.data.process import BATCH, START, STEPS, Remembering
from tests.support.covering import covering

ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(processes):
    """What each process prints; all have 4 devices in all."""
    flags = f"--xla_force_host_platform_device_count={4 // processes}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    address = f"127.0.0.1:{free_port()}"
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.data.process", address, str(processes), str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )
        for i in range(processes)
    ]
    try:
        outputs = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert not any(child.returncode for child in children), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("processes", covering([1, 2, 4], [2]))
def test_processes_feed_the_same_batches_and_each_reads_its_own_rows(processes):
    split = Split([Remembering()], seed=0, shuffle=True)
    expected = [split.sample_ids(START + step, BATCH).tolist() for step in range(STEPS)]
    found = run(processes)
    own = BATCH // processes
    for i, process in enumerate(found):
        assert process["batches"] == expected
        rows = [ids[i * own : (i + 1) * own] for ids in expected]
        # It may have read ahead of the last step.
        assert process["seen"][: own * STEPS] == list(chain.from_iterable(rows))
