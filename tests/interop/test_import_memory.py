"""An import needs the memory of the state and of two tensors: half a billion parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("form", ["3", "dcp"], ids=["DeepSpeed, stage 3", "dcp"])
def test_an_import_needs_two_tensors_above_its_state(tmp_path, form):
    """A tensor is all layers of one parameter: 0.4 GB of 6 GB.

    On a CPU the state is in host memory too: what glibc keeps of its freed arrays is no part of it.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    results = []
    for mode in ("write", "import"):
        command = [sys.executable, "-m", "tests.interop.large_torch_run", mode, form, tmp_path]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(done.stdout)
    peak = json.loads(results[1])
    assert peak["of"] > 0.5e9
    assert peak["state"] >= 12 * peak["of"]
    assert peak["largest"] == 4 * 24 * 1024 * 4096
    assert peak["grown"] < 2 * peak["largest"], f"{peak['grown'] / 1e6:.0f} MB"
