"""Pipelines of which some layers are frozen, against plain Optax; what a device holds of them."""

import math

import jax
import numpy as np
import pytest

import jaxspeed
from tests.support.covering import covering
from tests.train.frozen_nets import LAYERS, Listed, Stacked, batches
from tests.train.test_frozen_layers import assert_as_by_optax, scans, start

HOST = {"device": "cpu"}
LAYOUTS = {  # sections of the config, and the layers of each stage
    "two stages": ({"mesh": {"pipe": 2}}, [(0, 1, 2), (3, 4, 5)]),
    "stage 3": (
        {
            "mesh": {"pipe": 2, "data": 2, "tensor": 2},
            "zero_optimization": {"stage": 3},
            "parallel": {"logical_axes": {"up/kernel": [None, "mlp"], "up/bias": ["mlp"]}},
        },
        [(0, 1, 2), (3, 4, 5)],
    ),
    "chunks": (
        {
            "mesh": {"pipe": 2},
            "zero_optimization": {"stage": 1},
            "parallel": {"pipeline_schedule": "interleaved", "pipeline_chunks": 3},
        },
        [(0, 2, 4), (1, 3, 5)],
    ),
    "saved": (
        {"mesh": {"pipe": 2}, "parallel": {"pipeline_recompute": "save"}},
        [(0, 1, 2), (3, 4, 5)],
    ),
    "padded": (
        {
            "mesh": {"pipe": 4, "data": 2},
            "zero_optimization": {"stage": 2},
            "gradient_accumulation_steps": 4,
        },
        [(0, 1), (2, 3), (4, 5), ()],
    ),
    "offload": (
        {"mesh": {"pipe": 2}, "zero_optimization": {"stage": 2, "offload_optimizer": HOST}},
        [(0, 1, 2), (3, 4, 5)],
    ),
}
RANGES = {
    "blocks[-2:]/**": [4, 5],
    "blocks[2:4]/**": [2, 3],  # of two stages the last and the first
    "blocks[:1]/**": [0],
    "blocks[1:5]/**": [1, 2, 3, 4],  # of two stages two layers each, at three places
    "blocks[9:]/**": [],  # covers no layer: only the head is trained
}
GRID = [
    (name, pattern, model) for name in LAYOUTS for pattern in RANGES for model in (Stacked, Listed)
]
DEFAULT = [
    ("two stages", "blocks[-2:]/**", Stacked),
    ("stage 3", "blocks[2:4]/**", Stacked),
    ("two stages", "blocks[1:5]/**", Stacked),
    ("chunks", "blocks[-2:]/**", Listed),
    ("saved", "blocks[9:]/**", Stacked),
    ("padded", "blocks[-2:]/**", Listed),
]


def engine_of(name, pattern, model=Stacked):
    sections = {"gradient_accumulation_steps": 2, **LAYOUTS[name][0]}
    if model is Listed and "parallel" in sections:
        parallel = {k: v for k, v in sections["parallel"].items() if k != "logical_axes"}
        sections["parallel"] = parallel
    return start(model, trainable=(pattern, "head/**"), **sections)


@pytest.mark.default_cases("saved-blocks[9:]/**-Stacked")
@pytest.mark.parametrize(("name", "pattern", "model"), covering(GRID, DEFAULT))
def test_ten_steps_equal_plain_optax(name, pattern, model):
    assert_as_by_optax(engine_of(name, pattern, model), RANGES[pattern])


@pytest.mark.sampled
def test_the_check_against_plain_flax_knows_which_layers_are_trained():
    report = engine_of("two stages", "blocks[2:4]/**").check(batches(1)[0])
    assert report.ok, str(report)


def held(arrays):
    """The most bytes of these arrays, with those of scalars left out, that a device holds."""
    totals: dict[jax.Device, int] = {}
    for x in jax.tree.leaves(arrays):
        for shard in x.addressable_shards if x.ndim else ():
            totals[shard.device] = totals.get(shard.device, 0) + shard.data.nbytes
    return max(totals.values())


@pytest.mark.parametrize("pattern", list(RANGES)[:3])
def test_a_device_holds_what_the_stage_with_most_trained_layers_needs(pattern):
    engine = engine_of("two stages", pattern)
    parameters = engine.parameters
    layer = sum(x[0].nbytes for path, x in parameters.items() if path.startswith("blocks"))
    head = sum(x.nbytes for path, x in parameters.items() if path.startswith("head"))
    stages = LAYOUTS["two stages"][1]
    most = max(len(set(layers) & set(RANGES[pattern])) for layers in stages)
    assert held(engine.state.opt) <= 2 * (most * layer + head)
    layout = engine.program.pipeline.layout
    accumulators = [
        layout.chunks * math.prod(layout.accumulator(name)[0]) for name in layout.gradient_pieces
    ]
    assert 4 * sum(accumulators) == most * layer


def backward_scans(jaxpr):
    return sorted({trips for trips, reverse, _ in scans(jaxpr) if reverse})


def test_layers_below_all_that_are_trained_have_no_backward_pass():
    """The last stage has one trained layer, the last: no other layer is differentiated."""

    def trips(pattern):
        engine = engine_of("two stages", pattern)
        batch = engine.program.abstract_batch(batches(1)[0])
        return backward_scans(engine.program.step.trace(engine.program.state, batch).jaxpr)

    assert trips("blocks[5:]/**") == [1]
    assert trips("blocks[2:3]/**") == [1, 2]  # the last stage returns a gradient through its layers
    assert LAYERS == 6


@pytest.mark.full
def test_a_pipeline_generates_and_diagnoses_with_divided_stacks():
    family = {"family": "gpt2", "preset": "tiny", "config": {"num_hidden_layers": 4}}
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": family,
        "run": {"compilation_cache": False},
    }
    trainable = ["blocks[3:]/**"]
    free = jaxspeed.initialize(config=config)
    engine = jaxspeed.initialize(config=config | {"mesh": {"pipe": 2}, "trainable": trainable})
    engine.parameters = free.parameters
    said = [each.generate([[1, 2, 3]], 5, temperature=0)[0].tokens for each in (engine, free)]
    assert said[0] == said[1]
    path = next(p for p in engine.parameters if p.startswith("blocks") and "norm" in p)
    engine.parameters = {path: engine.parameters[path].at[1].set(np.nan)}
    tokens = np.ones((8, 17), np.int32)
    assert "blocks" in str(engine.diagnose({"tokens": tokens}))
