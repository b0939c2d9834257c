"""Models whose state is many times what a device holds, on one device: read from the compilers.

DeepSpeed's figures are 13 billion parameters on one GPU of 32 GB with ZeRO-Offload, and 40 billion
on one with ZeRO-3 Offload and 1.5 TB of host memory.
"""

import importlib.util

import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.in_child import compile_for
from tests.system.large_gpt import Large

pytestmark = pytest.mark.full  # minutes of compiling

GB = 10**9
COMPILERS = {
    "v5p:1x1x1": ("libtpu", "needs libtpu (pip install jaxspeed[tpu])"),
    "h100:1": ("jax_cuda13_plugin", "needs jax[cuda13] (3.4 GB) to compile for a GPU"),
}


@pytest.mark.parametrize(
    ("target", "size", "most"),
    [
        ("v5p:1x1x1", "13b", 16 * GB),
        ("v5p:1x1x1", "40b", 32 * GB),
        ("h100:1", "13b", 32 * GB),
        ("h100:1", "40b", 32 * GB),
    ],
)
def test_a_large_gpt_trains_on_one_device(target, size, most):
    module, reason = COMPILERS[target]
    if importlib.util.find_spec(module) is None:
        pytest.skip(reason)
    large = Large(size)
    found = compile_for(target_of(target), large).report
    assert found.argument_bytes + found.temp_bytes <= most
    assert found.host_argument_bytes + found.host_temp_bytes <= 20 * large.parameters()
