"""Rematerialization and host offload change no result.

Recomputation by every policy, saved activations in host memory or sharded over tensor, optimizer
state and parameters in host memory, with ZeRO 0 to 3, tensor 2 and pipe 2: ten steps of SGD with
momentum in fp32 equal plain JAX on one device. Dropout is on in all of GPT-2 and ViT, so that a
recomputed pass draws what it drew. The points hold every pair of settings that go together, as a
test of its own says; a few always run, which hold every setting of each field but `remat`; the
others with `full`.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

from tests.train.cases import CASES
from tests.train.parity import (
    assert_loss_fell,
    assert_losses_equal,
    leaf_differences,
    plain,
    plain_of,
    run,
    whole_difference,
)
from tests.train.test_parity_pipeline import case_of

LAYERS = 4
REMAT = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "attention": "attention",
    "every": {"every_n": 2},
    "names": {"save": ["mlp_up", "attention"], "recompute": ["mlp_hidden"]},
    "moved": {"save": ["query"], "offload": ["mlp_up", "attention"]},
    "budget": {"budget": 60_000},
}
KEPT = {
    "device": {},
    "host": {"cpu_checkpointing": True},
    "part": {"cpu_checkpointing": True, "cpu_checkpointing_ratio": 0.25},
    "cut": {"partition_activations": True},
    "both": {"cpu_checkpointing": True, "partition_activations": True},
}
OPTIMIZER = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "cores": {"offload_optimizer": {"device": "cpu", "where": "host"}},
}
PARAM = {"device": {}, "host": {"offload_param": {"device": "cpu"}}}
MESH = {
    "data": {"data": 8},
    "tensor": {"data": 4, "tensor": 2},
    "pipe": {"pipe": 2, "data": 4},
    "all": {"pipe": 2, "data": 2, "tensor": 2},
}
STAGES, MICRO, MODELS = (0, 1, 2, 3), (1, 4), ("gpt2", "llama", "vit")


class Point(NamedTuple):
    """What one run is set to."""

    remat: str
    kept: str
    optimizer: str
    param: str
    stage: int
    mesh: str
    model: str
    micro: int

    @property
    def sections(self):
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        sections = {
            "mesh": MESH[self.mesh],
            "zero_optimization": zero | OPTIMIZER[self.optimizer] | PARAM[self.param],
        }
        if self.remat != "none":
            sections["parallel"] = {"remat": REMAT[self.remat]}
        if self.kept != "device":
            sections["activation_checkpointing"] = KEPT[self.kept]
        return sections

    @property
    def goes_together(self):
        """Whether the words make a config: what is kept of nothing, say, cannot be moved."""
        pipe, tensor = self.mesh in ("pipe", "all"), self.mesh in ("tensor", "all")
        return (
            (self.kept == "device" or self.remat != "none")
            and not (self.remat == "budget" and self.kept in ("host", "part", "both"))
            and (tensor or self.kept not in ("cut", "both"))
            and (self.micro > 1 or not pipe)
        )


# Ordered so that points with one reference follow each other.
COVERING = [
    Point("names", "host", "half", "host", 0, "data", "gpt2", 1),
    Point("none", "device", "device", "device", 1, "data", "gpt2", 1),
    Point("attention", "cut", "device", "device", 3, "tensor", "gpt2", 1),
    Point("dots", "cut", "device", "host", 1, "tensor", "gpt2", 1),
    Point("budget", "cut", "half", "host", 2, "all", "gpt2", 4),
    Point("dots", "both", "half", "host", 3, "all", "gpt2", 4),
    Point("none", "device", "host", "device", 0, "all", "gpt2", 4),
    Point("moved", "device", "host", "host", 3, "pipe", "gpt2", 4),
    Point("full", "host", "device", "device", 1, "pipe", "gpt2", 4),
    Point("dots", "device", "device", "device", 0, "pipe", "gpt2", 4),
    Point("every", "device", "host", "host", 2, "pipe", "gpt2", 4),
    Point("every", "host", "device", "host", 3, "tensor", "gpt2", 4),
    Point("dots", "host", "host", "host", 3, "data", "llama", 1),
    Point("attention", "host", "half", "host", 1, "data", "llama", 1),
    Point("full", "both", "half", "host", 0, "tensor", "llama", 1),
    Point("none", "device", "device", "host", 2, "tensor", "llama", 1),
    Point("budget", "cut", "host", "host", 0, "tensor", "llama", 1),
    Point("names", "cut", "host", "device", 1, "all", "llama", 4),
    Point("every", "host", "device", "device", 2, "all", "llama", 4),
    Point("moved", "cut", "half", "device", 2, "all", "llama", 4),
    Point("every", "cut", "half", "host", 0, "all", "llama", 4),
    Point("moved", "host", "half", "host", 0, "data", "llama", 4),
    Point("full", "device", "half", "device", 2, "data", "llama", 4),
    Point("attention", "host", "host", "host", 2, "pipe", "llama", 4),
    Point("names", "device", "device", "device", 3, "pipe", "llama", 4),
    Point("attention", "both", "host", "host", 3, "tensor", "llama", 4),
    Point("every", "device", "half", "host", 1, "data", "vit", 1),
    Point("budget", "device", "device", "device", 1, "data", "vit", 1),
    Point("moved", "both", "device", "device", 1, "tensor", "vit", 1),
    Point("names", "both", "device", "host", 2, "tensor", "vit", 1),
    Point("attention", "device", "device", "device", 0, "all", "vit", 4),
    Point("full", "cut", "host", "host", 3, "all", "vit", 4),
    Point("dots", "host", "device", "device", 2, "data", "vit", 4),
    Point("none", "device", "half", "device", 3, "pipe", "vit", 4),
    Point("budget", "device", "host", "host", 3, "pipe", "vit", 4),
    Point("every", "both", "host", "device", 0, "tensor", "vit", 4),
    Point("names", "host", "cores", "host", 2, "data", "gpt2", 1),
    Point("attention", "device", "cores", "device", 0, "pipe", "llama", 4),
    Point("dots", "both", "cores", "host", 1, "all", "llama", 4),
    Point("budget", "cut", "cores", "device", 3, "tensor", "vit", 4),
    Point("full", "cut", "cores", "host", 1, "all", "vit", 4),
    Point("moved", "host", "cores", "host", 3, "tensor", "vit", 4),
    Point("none", "device", "cores", "host", 2, "all", "vit", 4),
    Point("every", "cut", "cores", "host", 3, "tensor", "vit", 4),
    Point("moved", "part", "cores", "host", 1, "tensor", "gpt2", 1),
    Point("names", "part", "half", "device", 3, "all", "llama", 4),
    Point("attention", "part", "host", "device", 1, "tensor", "llama", 4),
    Point("dots", "part", "host", "host", 2, "data", "vit", 1),
    Point("every", "part", "device", "device", 0, "pipe", "vit", 4),
    Point("full", "part", "half", "host", 2, "data", "vit", 4),
]
ALWAYS = {COVERING[i] for i in (20, 24, 25, 32, 44)}


def optimizer(case):
    """At the whole rate of the case, rounding alone grows to 4e-5 of a norm in ten steps of 16
    samples, with nothing saved too."""
    return optax.sgd(case.rates[1] / 4, momentum=0.9)


@functools.lru_cache(maxsize=2)
def on_one_device(model, micro, ranks):
    case = case_of(model, LAYERS)
    return plain(case, micro, optimizer(case), ranks=ranks)


def grid():
    for point in COVERING:
        marks = () if point in ALWAYS else pytest.mark.full
        yield pytest.param(point, id="-".join(map(str, point)), marks=marks)


@pytest.mark.default_cases("attention-both-host-host-3-tensor-llama-4")
@pytest.mark.parametrize("point", [*grid()])
def test_what_is_saved_changes_no_result(point):
    case = case_of(point.model, LAYERS)
    ours = run(case, point.stage, point.micro, optimizer(case), **point.sections)
    ranks = MESH[point.mesh]["data"]
    reference = on_one_device(point.model, point.micro, ranks)
    assert_losses_equal(ours, reference, 1e-5)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, reference) <= 1e-5
    assert max(leaf_differences(case, ours, reference).values()) <= 1e-5
    state, host = ours.engine.state, {"pinned_host"}
    assert kinds(state.params) == (host if point.param == "host" else {"device"})
    of_optimizer = {
        "host": host,
        "device": {"device"},
        "half": {"device", "pinned_host"},
        "cores": host,
    }
    assert kinds(state.opt) == of_optimizer[point.optimizer]


KINDS = ("linen", "pair", "batch statistics", "tied weights", "called twice", "unlike blocks")


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if i == 6 else pytest.mark.full)
        for i, (name, stage) in enumerate(itertools.product(KINDS, (0, 3)))
    ],
)
def test_any_model_trains_from_host_memory(name, stage):
    """Parameters that several layers read, statistics, functions and lists of unlike blocks."""
    case, micro = CASES[name], 4 if stage else 1
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    sections = {"zero_optimization": zero | OPTIMIZER["host"] | PARAM["host"]}
    if name != "linen":  # its two layers are no repetition
        sections["parallel"] = {"remat": "full"}
    ours, reference = run(case, stage, micro, "sgd", **sections), plain_of(name, micro, "sgd")
    assert_losses_equal(ours, reference, 1e-5)
    assert whole_difference(case, ours, reference) <= 1e-5
    assert kinds(ours.engine.state.params) == {"pinned_host"}


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def settings():
    """Every setting of every field that goes together with the others'."""
    values = (REMAT, KEPT, OPTIMIZER, PARAM, STAGES, MESH, MODELS, MICRO)
    return [p for p in itertools.starmap(Point, itertools.product(*values)) if p.goes_together]


def pairs(points):
    fields = itertools.combinations(Point._fields, 2)
    return {(a, getattr(p, a), b, getattr(p, b)) for a, b in fields for p in points}


def test_the_covering_points_hold_every_pair():
    assert pairs(COVERING) == pairs(settings())
    for field in (field for field in Point._fields if field != "remat"):
        assert {getattr(p, field) for p in ALWAYS} == {getattr(p, field) for p in COVERING}
