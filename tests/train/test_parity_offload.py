"""Optimizer offload trains as plain JAX does, and leaves the state in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspeed
from tests.support.reference import DynamicScale
from tests.train import parity
from tests.train.cases import CASES
from tests.train.parity import (
    STAGES,
    assert_loss_fell,
    assert_losses_equal,
    plain,
    plain_of,
    run,
    whole_difference,
)

HOST = "pinned_host"
WAYS = {0: ("adam", 4), 1: ("sgd", 1), 2: ("adam", 1), 3: ("sgd", 4)}


def zero(stage, **offload):
    return {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu", **offload},
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
    assert kinds(ours.engine.state.opt) == {HOST}
    assert kinds(ours.engine.state.params) == {"device"}
    parity.assert_cut_as_the_stage_says(ours, plain, stage)


SECTIONS = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
}
MESHES = {
    "adamw": {"data": 4, "tensor": 2},
    "lamb": {"data": 8},
    "muon": {"data": 2, "tensor": 2, "replica": 2},
    "momentum": {"pipe": 2, "data": 4},
    "adagrad": {"data": 8},
    "lion": {"pipe": 2, "data": 2, "tensor": 2},
}


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("stage", [1, 3])
def test_offload_trains_as_the_resident_state_does(name, stage):
    """The config's own optimizers, on meshes, with clipping, an average and a schedule."""
    case, mesh = CASES["gpt2"], MESHES[name]
    more = {
        "accumulation": 4,
        "optimizer": None,
        "optimizer_section": {**SECTIONS[name], "ema_decay": 0.9},
        "mesh": mesh,
        "gradient_clipping": 0.5,
        "steps": 5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    resident = run(case, stage, **more)
    ours = run(case, stage, **more, zero_optimization=zero(stage))
    assert_losses_equal(ours, resident, 1e-6)
    np.testing.assert_allclose(ours.norms, resident.norms, rtol=1e-5)
    assert whole_difference(case, ours, resident) <= 1e-5
    a, b = ours.engine.state, resident.engine.state
    for path in b.ema:
        np.testing.assert_allclose(a.ema[path], b.ema[path], rtol=1e-5, atol=1e-6)
    assert kinds(a.opt) == kinds(a.ema) == {HOST}
    assert [int(x) for x in jax.tree.leaves(a.opt) if not x.ndim] == [5] * sum(
        not x.ndim for x in jax.tree.leaves(b.opt)
    )
