"""What pipelines compile to for TPUs: memory that does not grow, and a 70B's bytes on 256 chips."""

from typing import Any

import pytest

from tests.support.topology import run_on_topology

pytestmark = pytest.mark.full  # minutes of compiling


def bytes_of(topology: str, case: dict[str, Any]) -> dict[str, int]:
    return run_on_topology("tests.system.pipeline_programs:bytes_of", topology, **case)


def test_memory_of_1f1b_does_not_grow_with_the_micro_batches():
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8}
    case = {
        "mesh": {"pipe": 4, "data": 2},
        "stage": 2,
        "mixed": True,
        "seq": 256,
        "sizes": {**sizes, "vocab_size": 2048, "max_position_embeddings": 256},
    }
    few, many = (bytes_of("v5e:2x4", {**case, "micro_batches": count}) for count in (4, 32))
    assert many["temp_bytes"] <= 1.02 * few["temp_bytes"]


def test_llama3_70b_fits_256_chips():
    case = {
        "family": "llama",
        "preset": "llama3-70b",
        "mesh": {"pipe": 4, "data": 8, "tensor": 8},
        "stage": 3,
        "mixed": True,
        "seq": 4096,
        "micro_batches": 16,
        "parallel": {
            "pipeline_recompute": "layers",
            "sequence_parallel_activations": True,
            "tensor_overlap": "none",
        },
    }
    found = bytes_of("v5p:8x8x4", case)
    parameters = 70_553_706_496
    assert found["argument_bytes"] == pytest.approx(12 * parameters / 256, rel=0.02)
    assert found["temp_bytes"] <= 5e9
