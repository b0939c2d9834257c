"""Steps on preferences have no logits of all tokens, and need no more memory than others."""

import functools
import importlib.util
from typing import Any

import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile import in_child
from tests.support.topology import run_on_topology
from tests.system.measured import measure_on_gpus
from tests.system.preference_programs import TOKENS, VOCABULARY, program

LOGITS = VOCABULARY // 8  # a column of more is wider than an MLP's activations


def check(found: dict[str, Any], usual: dict[str, Any]) -> None:
    """Compare a step with one of next tokens, of as many tokens."""
    assert found["temp_bytes"] <= 1.15 * usual["temp_bytes"]
    assert found["largest"][-1]["bytes"] < TOKENS * VOCABULARY // 2, "a quarter of logits is listed"
    of_tokens = [x["shape"] for x in found["largest"] if TOKENS in x["shape"]]
    assert not [shape for shape in of_tokens if any(x >= LOGITS and x != TOKENS for x in shape)]


@pytest.mark.full
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_eight_billion_parameters_on_64_chips(objective):
    found, usual = (
        run_on_topology("tests.system.preference_programs:step", "v5p:4x4x4", objective=name)
        for name in (objective, "next_token")
    )
    check(found, usual)


@pytest.mark.full
@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, in_child.CUDA_PLUGINS)),
    reason="needs jax[cuda13] (3.4 GB) to compile for a GPU",
)
def test_eight_billion_parameters_on_eight_gpus():
    found, usual = (
        measure_on_gpus(target_of("h100:8"), functools.partial(program, objective=name))
        for name in ("dpo", "next_token")
    )
    check(found, usual)
