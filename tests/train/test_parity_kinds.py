"""Linen modules, pairs of functions and models with state train as plain JAX does."""

import pytest

from tests.train.parity import assert_trains_as_plain_jax, grid


@pytest.mark.default_cases("pair-stage0-x1-adam")
@pytest.mark.parametrize(
    ("name", "stage", "accumulation", "optimizer"),
    grid("linen", "pair", "dropout", "batch statistics"),
)
def test_trains_as_plain_jax(name, stage, accumulation, optimizer):
    assert_trains_as_plain_jax(name, stage, accumulation, optimizer)
