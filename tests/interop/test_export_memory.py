"""A model that does not fit is exported all the same: a billion parameters within one gigabyte."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxspeed.interop.safetensors import TensorFile
from tests.checkpoint.large import SHAPES, element
from tests.interop import large_folder

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]


def run(module, mode, folder):
    command = [sys.executable, "-m", module, mode, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_folder_of_a_billion_parameters_is_read_and_written_tensor_by_tensor(tmp_path):
    """Its stacked parameters have 1.1 GB, the largest tensors 0.26 GB."""
    run("tests.interop.large_folder", "write", tmp_path)
    grown = json.loads(run("tests.interop.large_folder", "import_and_export", tmp_path))
    largest = 4 * large_folder.VOCAB * large_folder.EMBED
    for what, most in grown.items():
        assert most < 2 * largest + 300e6, f"{what}: {most / 1e6:.0f} MB"
    files = [TensorFile.open(path) for path in (tmp_path / "out").glob("*.safetensors")]
    found = {name: (file, tensor.shape) for file in files for name, tensor in file.tensors.items()}
    expected = large_folder.shapes(large_folder.CONFIG)
    assert {name: shape for name, (_, shape) in found.items()} == expected
    for name, (file, shape) in found.items():
        if "layers.7." in name or "layers" not in name:
            np.testing.assert_array_equal(file.array(name), large_folder.values(name, shape))


def test_a_billion_parameters_are_exported_within_a_gigabyte(tmp_path):
    run("tests.checkpoint.large", "write", tmp_path)
    grown = json.loads(run("tests.checkpoint.large", "export", tmp_path))["grown"]
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
