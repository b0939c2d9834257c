"""Initialising never needs more than the shards: read from the program, and from the process."""

import json
import math
import os
import subprocess
import sys

import jax
import pytest
from jaxspeed.models import build

from jaxspeed.hlo import largest_buffers
from jaxspeed.train.build import build_program
from tests.support.topology import ROOT
from tests.system import stacks

MB = 10**6
# 95 million parameters (1.1 GB of fp32 Adam), and half a billion (6.4 GB).
SMALL = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12}
LARGE = {"hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 16}
VOCABULARY = 50304


def initialised(sizes: dict[str, int]) -> dict[str, int]:
    """What `tests.system.resident` tells of a process of its own with 8 devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.system.resident", json.dumps(sizes)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["whole"] == [], "every parameter is cut"
    return found


def test_no_array_of_the_initial_program_is_larger_than_the_largest_shard():
    model = build("gpt2", "tiny", {"vocab_size": 512})
    program = build_program(
        stacks.config_of(3, mixed=False), model.factory, model.loss, devices=jax.devices()
    )
    compiled = jax.jit(program.init).lower(0).compile()
    (largest, *_) = largest_buffers(compiled.as_text(), 1)
    shards = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(program.state.params)]
    assert largest.bytes == 4 * max(map(math.prod, shards))


@pytest.mark.full
def test_the_process_holds_a_quarter_more_than_the_state_at_most():
    """Without what Python, JAX and XLA take before there is a model: 250 MB here."""
    found = initialised({**SMALL, "vocab_size": VOCABULARY})
    assert found["parameters"] > 90 * MB
    assert found["state"] == pytest.approx(12 * found["parameters"], rel=1e-6)
    assert found["peak"] - found["baseline"] < 1.25 * found["state"]


@pytest.mark.full
def test_half_a_billion_parameters_initialise_within_a_quarter_more_than_their_state():
    found = initialised({**LARGE, "vocab_size": VOCABULARY})
    assert found["parameters"] > 500 * MB
    assert found["state"] == pytest.approx(12 * found["parameters"], rel=1e-6)
    assert found["peak"] < 1.25 * found["state"], "the runtime's own included"
