"""The reference models train as plain single-device JAX does, at every ZeRO stage."""

import pytest

from tests.train.parity import assert_trains_as_plain_jax, grid


@pytest.mark.parametrize(
    ("name", "stage", "accumulation", "optimizer"),
    grid("gpt2", "llama", "vit"),
)
def test_trains_as_plain_jax(name, stage, accumulation, optimizer):
    assert_trains_as_plain_jax(name, stage, accumulation, optimizer)
