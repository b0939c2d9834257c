"""LoRA on any mesh equals a plain loop of JAX and Optax that trains merged weights."""

import itertools

import numpy as np
import pytest

from tests.adapters.lora_loop import adapted_cases, split_of, train_plainly
from tests.support.covering import covering

CASES = adapted_cases()
STEPS = 10
ALL = list(itertools.product(CASES, range(4), (1, 2), (1, 2)))
COVERING = [
    ("gpt2", 1, 2, 2),
    ("llama", 3, 2, 1),
    ("experts", 3, 1, 2),
    ("linen", 2, 1, 1),
    ("pair", 0, 2, 1),
]


@pytest.mark.default_cases("linen-2-1-1")
@pytest.mark.parametrize("name, stage, tensor, pipe", covering(ALL, COVERING))
def test_lora_equals_a_plain_loop(name, stage, tensor, pipe):
    case = CASES[name]
    engine = case.engine(stage, tensor, pipe)
    base, adapters = split_of(engine.parameters)
    assert adapters
    batches = case.batches(STEPS)
    losses = [engine.train_batch(batch)["loss"] for batch in batches]
    expected, own = train_plainly(case, {**base, **adapters}, batches, 1.5)
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5, atol=1e-5)
    after, trained = split_of(engine.parameters)
    for path, value in after.items():
        np.testing.assert_array_equal(value, base[path], err_msg=path)
    for path, value in trained.items():
        np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)
