"""Counts of experts' tokens are the same integers on every mesh, and so are their biases."""

from typing import Any

import jax
import numpy as np
import pytest
from jaxspeed.models.mixture import MixtureDecoder

import jaxspeed
from tests.moe.plain_mixtures import batches, plain
from tests.moe.test_mixture_training import config
from tests.support.covering import covering

# (devices, what the config sets)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "one device, 4 micro-batches": (1, {"accumulation": 4, "remat": "full"}),
    "expert 8": (8, {"expert": 8, "remat": "full"}),
    "data 8, 4 micro-batches": (8, {"accumulation": 4}),
    "expert 2, pipe 2": (8, {"expert": 2, "pipe": 2, "accumulation": 4, "remat": "full"}),
}
DEFAULT: list[str] = []


@pytest.mark.parametrize("case", covering(CASES, DEFAULT))
def test_counts_of_a_step_are_those_of_one_device(case, monkeypatch):
    monkeypatch.setattr(MixtureDecoder, "after_step", lambda self: None)  # it resets them
    devices, given = CASES[case]
    engine = jaxspeed.initialize(
        config=config("deepseek", **given),
        example_batch=batches()[0],
        devices=jax.devices()[:devices],
    )
    engine.train_batch(batches()[0])
    counts = np.asarray(engine.state.variables["expert_counts"])
    accumulation = given.get("accumulation", 1)
    ranks = devices // given.get("pipe", 1)
    expected = plain("deepseek", ranks, accumulation)
    assert expected.margin > 1e-5
    np.testing.assert_array_equal(counts, expected.counts[0])
    np.testing.assert_array_equal(counts, plain("deepseek", 1, 1).counts[0])
