"""A model trains whose masters and moments are larger than what its process may allocate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.default_cases("nvme")
@pytest.mark.parametrize("device", ["nvme", "none"])
def test_state_on_a_disk_needs_less_memory_than_its_size(tmp_path, device):
    command = [sys.executable, "-m", "tests.disk.limited", device, str(tmp_path)]
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if device == "none":
        assert done.returncode and "Out of memory" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert second < first
