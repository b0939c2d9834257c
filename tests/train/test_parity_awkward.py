"""Awkward models train as plain single-device JAX does, at every ZeRO stage."""

import pytest

from tests.train.parity import assert_trains_as_plain_jax, grid


@pytest.mark.default_cases("keyword_arguments-stage1-x1-sgd")
@pytest.mark.parametrize(
    ("name", "stage", "accumulation", "optimizer"),
    grid("tied weights", "called twice", "unlike blocks", "keyword arguments"),
)
def test_trains_as_plain_jax(name, stage, accumulation, optimizer):
    assert_trains_as_plain_jax(name, stage, accumulation, optimizer)
