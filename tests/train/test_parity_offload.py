"""Optimizer offload trains as plain JAX does, and leaves the state in host memory."""

import jax
import pytest

from tests.train import parity
from tests.train.cases import CASES
from tests.train.parity import (
    STAGES,
    assert_loss_fell,
    assert_losses_equal,
    plain_of,
    run,
    whole_difference,
)

WAYS = {0: ("adam", 4), 1: ("sgd", 1), 2: ("adam", 1), 3: ("sgd", 4)}


def zero(stage, ratio=1.0):
    return {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu", "ratio": ratio},
    }


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize("name", ["gpt2", "pair"])
@pytest.mark.parametrize("stage", STAGES)
def test_offload_trains_as_plain_jax(name, stage):
    optimizer, accumulation = WAYS[stage]
    case = CASES[name]
    plain = plain_of(name, accumulation, optimizer)
    ours = run(case, stage, accumulation, optimizer, zero_optimization=zero(stage))
    assert_losses_equal(ours, plain, 1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, plain) <= 1e-4
    assert kinds(ours.engine.state.opt) == {"pinned_host"}
    assert kinds(ours.engine.state.params) == {"device"}
    parity.assert_cut_as_the_stage_says(ours, plain, stage)
