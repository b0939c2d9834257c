"""ZeRO 3 in the ticks of a pipeline, compiled for TPUs: what is gathered and reduced, and held.

XLA:TPU keeps small arrays in VMEM, which `temp_bytes` leaves out: the model is wide.
"""

from typing import Any

import pytest

from tests.support.topology import run_on_topology
from tests.system.measured import collectives_of

pytestmark = pytest.mark.full  # minutes of compiling

STAGES, LAYERS, MICRO_BATCHES = 2, 16, 4
ROWS, TICKS = LAYERS // STAGES, MICRO_BATCHES + STAGES - 1
BLOCK = 2048 * (2048 * 2 + 1024 * 2 + 4096 * 3)  # weights of one layer's matrices
NORMS = 2 * 2048
CASE: dict[str, Any] = {
    "family": "llama",
    "stage": 3,
    "mixed": True,
    "micro_batches": MICRO_BATCHES,
    "seq": 512,
    "sizes": {
        "num_hidden_layers": LAYERS,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
    },
}


def gathering(topology: str, **mesh: int) -> dict[str, Any]:
    """{"tick": figures, "step": figures}"""
    cases = {
        gather: {**CASE, "mesh": {"pipe": STAGES, **mesh}, "parallel": {"pipeline_gather": gather}}
        for gather in ("tick", "step")
    }
    return run_on_topology("tests.system.pipeline_programs:figures_of", topology, cases=cases)


@pytest.fixture(scope="module")
def with_tensor() -> dict[str, Any]:
    return gathering("v5e:2x4", data=2, tensor=2)


def of_stages(found: dict[str, Any], kind: str) -> int:
    """Bytes over the data axis in a step, of what the stages compute by themselves."""
    return sum(
        c.bytes * c.runs
        for c in collectives_of(found)
        if c.kind == kind and c.axes == ("data",) and "shard_map" in c.site
    )


def test_each_layer_is_gathered_for_each_pass_of_a_tick(with_tensor):
    """Once forward; backward to make its residuals again, and to use them."""
    tick = with_tensor["tick"]
    assert of_stages(tick, "all-gather") == TICKS * (1 + 2) * ROWS * 2 * (BLOCK // 2 + NORMS)
    sent = tick["report"]["gatherings"]["tick"]["sent"]
    assert of_stages(tick, "all-gather") / 2 == sent  # (d-1)/d on a ring of 2


def test_each_layers_gradient_is_scattered_in_each_backward_tick(with_tensor):
    for found in with_tensor.values():
        assert of_stages(found, "reduce-scatter") == TICKS * ROWS * 2 * (BLOCK // 2)
        # The report has the norms in it, which are all-reduced.
        assert found["report"]["reduced_sent"] * 2 == TICKS * ROWS * 2 * (BLOCK // 2 + NORMS)


def test_gathered_once_a_step_nothing_is_gathered_in_a_tick(with_tensor):
    step = with_tensor["step"]
    assert of_stages(step, "all-gather") == 0
    once = [c for c in collectives_of(step) if c.kind == "all-gather" and not c.in_accumulation]
    gathered = sum(c.bytes * c.runs for c in once if c.bytes >= ROWS * NORMS)
    assert gathered == ROWS * 2 * (BLOCK // 2 + NORMS)


def test_gathered_in_ticks_a_stage_holds_one_layers_weights():
    """Instead of all, those of one layer; and an eighth of all: cast to bf16 before the ticks, and
    once more because the gradients of a chunk are fp32 then, and bf16 of weights that are whole.
    """
    found = gathering("v5e:4x4", data=8)
    whole = ROWS * 2 * (BLOCK + NORMS)
    saved = found["step"]["temp_bytes"] - found["tick"]["temp_bytes"]
    assert saved >= whole * (1 - 1 / ROWS - 1 / 8 - 1 / 8)
