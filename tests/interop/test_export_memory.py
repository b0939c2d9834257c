"""A model that does not fit is exported all the same: a billion parameters within one gigabyte."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.large import SHAPES, element

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_billion_parameters_are_exported_within_a_gigabyte(tmp_path):
    def run(mode):
        command = [sys.executable, "-m", "tests.checkpoint.large", mode, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("write")
    grown = json.loads(run("export"))["grown"]
    file = tmp_path / "out" / "model.safetensors"
    assert file.stat().st_size > 4e9
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    for name, (rows, columns) in SHAPES.items():
        start, _ = header[name]["data_offsets"]
        at = {"offset": 8 + length + start, "shape": (rows, columns)}
        tensor = np.memmap(file, np.float32, "r", **at)
        some = np.random.default_rng(0).integers(0, rows, 50)
        expected = element(some[:, None], np.arange(columns), columns)
        np.testing.assert_array_equal(tensor[some], expected, err_msg=name)
    assert grown < 1e9, f"{grown / 1e9:.2f} GB"
