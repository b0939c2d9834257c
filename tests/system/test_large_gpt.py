"""Models whose state is many times what a device holds, on one device: read from the compilers.

DeepSpeed's figures are 13 billion parameters on one GPU of 32 GB with ZeRO-Offload, and 40 billion
on one with ZeRO-3 Offload and 1.5 TB of host memory.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.support.topology import ROOT, run_on_topology
from tests.system import large_gpt

pytestmark = pytest.mark.full  # minutes of compiling

GB = 10**9


@pytest.mark.parametrize(("size", "most"), [("13b", 16 * GB), ("40b", 32 * GB)])
def test_a_large_gpt_trains_on_one_tpu(size, most):
    found = run_on_topology("tests.system.large_gpt:on_tpu", "v5p:2x2x1", size=size)
    assert found["device"] <= most
    assert found["host"] <= 20 * found["parameters"]


@pytest.mark.parametrize("size", ["13b", "40b"])
def test_a_large_gpt_trains_on_one_gpu(size):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs jax[cuda13] (3.4 GB) to compile for a GPU")
    child = subprocess.run(
        [sys.executable, large_gpt.__file__, size], cwd=ROOT, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["device"] <= 32 * GB
    assert found["host"] <= 20 * found["parameters"]
