"""Optimizer offload trains as plain JAX does, and leaves the state in host memory."""

import itertools

import jax
import numpy as np
import pytest

import jaxspeed
from tests.support.covering import covering
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


@pytest.mark.default_cases("2-pair")
@pytest.mark.parametrize(
    ("stage", "name"),
    covering(
        itertools.product(STAGES, ["gpt2", "pair"]),
        [(0, "pair"), (2, "pair"), (3, "pair")],  # stage 1 is below, with a ratio
    ),
)
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


@pytest.mark.full  # test_offloaded_update.py has the update of each
@pytest.mark.parametrize(("stage", "name"), [*itertools.product((1, 3), SECTIONS)])
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
    assert_losses_equal(ours, resident, 1e-5)
    np.testing.assert_allclose(ours.norms, resident.norms, rtol=1e-4)
    assert whole_difference(case, ours, resident) <= 1e-4
    a, b = ours.engine.state, resident.engine.state
    for path in filter(case.has_gradient, b.ema):
        np.testing.assert_allclose(a.ema[path], b.ema[path], rtol=1e-4, atol=1e-5)
    assert kinds(a.opt) == kinds(a.ema) == {HOST}
    counts = [[int(x) for x in jax.tree.leaves(each.opt) if not x.ndim] for each in (a, b)]
    assert counts[0] == counts[1] and set(counts[0]) == {5}


@pytest.mark.full  # test_parity_memory.py has a point that is updated there
@pytest.mark.parametrize("name", ["adamw", "lamb", "lion"])
def test_the_hosts_cores_update_as_the_device_does(name):
    case, stage = CASES["gpt2"], {"adamw": 3, "lamb": 0, "lion": 1}[name]
    more = {
        "accumulation": 4,
        "optimizer": None,
        "optimizer_section": {**SECTIONS[name], "ema_decay": 0.9},
        "mesh": MESHES[name],
        "gradient_clipping": 0.5,
        "steps": 3,
    }
    device, host = (
        run(case, stage, **more, zero_optimization=zero(stage, where=where))
        for where in ("device", "host")
    )
    assert_losses_equal(host, device, 1e-6)
    assert whole_difference(case, host, device) <= 1e-6
    assert kinds(host.engine.state.opt) == {HOST}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("precision", "stage"),
    covering(itertools.product(["bf16", "fp16"], [0, 3]), [("fp16", 3)]),
)
def test_16_bits_with_masters_in_host_memory(precision, stage):
    """fp16 begins at a scale that overflows, so that its first steps are skipped."""
    case = CASES["gpt2"]
    start = {"initial_scale_power": 24, "hysteresis": 1} if precision == "fp16" else {}
    more = {precision: {"enabled": True, **start}}
    # Stage 2, where layers read 16-bit parameters too, is what stage 3 comes to.
    resident = run(case, min(stage, 2), 2, "adam", **more)
    ours = run(case, stage, 2, "adam", **more, zero_optimization=zero(stage))
    state = ours.engine.state
    assert int(state.skipped) == int(resident.engine.state.skipped)
    assert (int(state.skipped) > 0) == (precision == "fp16")
    assert_losses_equal(ours, resident, 2**-8)
    assert kinds(state.master) == kinds(state.opt) == {HOST}
    assert kinds(state.params) == {"device"}
    assert {x.dtype for x in state.params.values()} == {
        ours.engine.placements.rows["norm/scale"].read.dtype
    }
    for path, param in state.params.items():
        row = ours.engine.placements[path]
        whole = np.asarray(state.master[path])[tuple(map(slice, row.leaf.shape))]
        stored = np.asarray(param)[tuple(map(slice, row.leaf.shape))]
        np.testing.assert_array_equal(stored, whole.astype(param.dtype), err_msg=path)


def test_a_ratio_moves_the_largest_and_changes_no_number():
    case = CASES["pair"]
    plain = plain_of("pair", 1, "adam")
    ours = run(case, 1, 1, "adam", zero_optimization=zero(1, ratio=0.5))
    assert_losses_equal(ours, plain, 1e-5)
    assert whole_difference(case, ours, plain) <= 1e-4
    table = ours.engine.placements
    sizes = {
        waits: [np.prod(row.leaf.shape) for row in table if (row.opt.memory_kind == HOST) == waits]
        for waits in (True, False)
    }
    assert min(sizes[True]) >= max(sizes[False])
    share = sum(sizes[True]) / (sum(sizes[True]) + sum(sizes[False]))
    assert 0.5 <= share <= 0.5 + max(sizes[True]) / sum(sizes[True])
    assert kinds(ours.engine.state.opt) == {HOST, "device"}


def test_the_old_word_is_the_new_one():
    loaded = jaxspeed.Config.load(
        {"train_batch_size": 8, "zero_optimization": {"cpu_offload": True}}
    )
    assert loaded.zero_optimization.offload_optimizer.device == "cpu"
