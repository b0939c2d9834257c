"""Pipelines: the families train as on one device, whatever the schedule and whatever else is cut.

Schedules x pipe 2, 4, 8 x ZeRO stages 0 to 3, with data, replicas and tensor on the devices that
are left, ten steps of SGD in fp32. Dropout is on in all of GPT-2 and ViT. The covering points hold
every pair of the settings that could interfere, as a test of its own says; a few of them always
run, the others with `full`.
"""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.reference import NnxReference
from tests.train.cases import family, language, pictures
from tests.train.parity import (
    assert_loss_fell,
    assert_losses_equal,
    leaf_differences,
    plain,
    run,
    whole_difference,
)

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.2}
TEXT = {"vocab_size": 32, "max_position_embeddings": 8} | SIZES
KEYS = ("k_proj/bias",)


@functools.cache
def case_of(name, layers):
    sizes = {"num_hidden_layers": layers}
    if name == "gpt2":
        return family("gpt2", language, KEYS, dropout=0.1, **TEXT, **sizes)
    if name == "vit":
        picture = {"image_size": 8, "patch_size": 4, "num_classes": 4}
        return family("vit", pictures, KEYS, dropout=0.1, **picture, **SIZES, **sizes)
    found = family("llama", language, num_key_value_heads=2, intermediate_size=48, **TEXT, **sizes)
    return with_half_norms(found)


def with_half_norms(case):
    """The norms of the blocks start at 0.5, so that the comparison can see 1e-5 of a deep stack.

    Of 16 layers that start at 1, an ulp of the first parameters moves one norm's plain update by
    1.3e-5 to 3e-5, at rates from 0.01 to 0.05: it moves by 0.003, which fp32 stores to 6e-8. At
    higher rates the steps are not stable. From 0.5, at the default rate: 3e-6.
    """

    def model(rngs):
        made = case.model(rngs)
        for norm in (made.blocks.attn_norm, made.blocks.mlp_norm):
            norm.scale.set_value(0.5 * norm.scale.get_value())
        return made

    return replace(case, model=model, plain=lambda: NnxReference(model))


class Point(NamedTuple):
    """What one run is set to; data is what of 8 devices is left."""

    model: str
    layers: int
    schedule: str
    pipe: int
    stage: int
    micro: int
    recompute: str = "stage"
    gather: str = "tick"
    tensor: int = 1
    cut: bool = False  # activations between tensor's cuts, along the sequence
    replica: int = 1
    chunks: int = 2  # of interleaved

    @property
    def ranks(self):
        return 8 // (self.pipe * self.tensor)

    @property
    def sections(self):
        words = {
            "pipeline_schedule": self.schedule,
            "pipeline_recompute": self.recompute,
            "pipeline_gather": self.gather,
            "sequence_parallel_activations": self.cut,
        }
        if self.schedule == "interleaved":
            words["pipeline_chunks"] = self.chunks
        mesh = {
            "pipe": self.pipe,
            "replica": self.replica,
            "data": self.ranks // self.replica,
            "tensor": self.tensor,
        }
        return {"mesh": mesh, "parallel": words}

    @property
    def name(self):
        given = zip(self._fields, self, strict=True)
        more = [f"{k}={v}" for k, v in given if v != self._field_defaults.get(k)]
        return "-".join(more).replace("=", "")


# Ordered so that points with one reference follow each other. Layers that a stage's share does not
# divide (5 and 6 over 4, 5 over 2, 10 over 8) are padded.
COVERING = [
    Point("gpt2", 8, "gpipe", 2, 0, 4, "save"),
    Point("gpt2", 8, "1f1b", 2, 1, 4, "layers"),
    Point("gpt2", 8, "1f1b", 2, 3, 4, "layers", "step"),
    Point("gpt2", 8, "interleaved", 2, 3, 4, "save"),
    Point("gpt2", 8, "1f1b", 2, 3, 4, replica=2),
    Point("gpt2", 8, "1f1b", 4, 0, 4),
    Point("gpt2", 8, "gpipe", 4, 3, 4, "stage", "step"),
    Point("gpt2", 8, "interleaved", 4, 1, 4, "layers"),
    Point("gpt2", 8, "interleaved", 2, 2, 4, tensor=2, chunks=4),
    Point("gpt2", 8, "1f1b", 8, 1, 8),
    Point("gpt2", 8, "gpipe", 8, 2, 8, "layers"),
    Point("gpt2", 8, "interleaved", 4, 2, 8, "save", tensor=2),
    Point("gpt2", 16, "interleaved", 8, 3, 8),
    Point("llama", 6, "gpipe", 2, 2, 3, "layers"),
    Point("llama", 6, "1f1b", 2, 0, 3, "layers"),
    Point("llama", 6, "interleaved", 2, 0, 2, chunks=3),
    Point("llama", 6, "1f1b", 2, 3, 3, tensor=2, cut=True),
    Point("llama", 6, "1f1b", 4, 2, 6, "save"),
    Point("llama", 6, "1f1b", 4, 3, 6, "layers"),
    Point("llama", 6, "gpipe", 4, 1, 4, "save", tensor=2, cut=True),
    Point("llama", 6, "1f1b", 4, 3, 4, "layers", "step", tensor=2),
    Point("llama", 10, "1f1b", 8, 0, 9, "layers"),
    Point("vit", 5, "gpipe", 2, 1, 3, tensor=2),
    Point("vit", 5, "1f1b", 2, 2, 3, tensor=2),
    Point("vit", 5, "1f1b", 4, 3, 5, "save", "step"),
    Point("vit", 5, "gpipe", 4, 0, 5, "layers"),
]
SCHEDULES, PIPE, STAGES = ("gpipe", "1f1b", "interleaved"), (2, 4, 8), (0, 1, 2, 3)
RECOMPUTES, GATHERS = ("stage", "layers", "save"), ("tick", "step")
DEPTH = {2: 3, 4: 6, 8: 9}


# GPT-2 has the schedules and dropout that ViT and LLaMA have, and takes twice as long to compile.
ALWAYS = {COVERING[i] for i in (15, 20, 22)}


def grid():
    """The covering points, and with `full` every schedule x pipe x stage x tensor 1 and 2."""
    for point in COVERING:
        marks = () if point in ALWAYS else pytest.mark.full
        yield pytest.param(point, id=point.name, marks=marks)
    every = itertools.product(SCHEDULES, PIPE, STAGES, (1, 2))
    for i, (schedule, pipe, stage, tensor) in enumerate(every):
        if pipe * tensor > 8:
            continue
        layers = 2 * pipe if schedule == "interleaved" else DEPTH[pipe]
        micro = 2 * pipe if schedule == "interleaved" else pipe + 1
        model = ("gpt2", "llama", "vit")[i % 3]
        recompute, gather = RECOMPUTES[i // 3 % 3], GATHERS[i // 2 % 2]
        cut = tensor == 2 and model != "vit"
        point = Point(model, layers, schedule, pipe, stage, micro, recompute, gather, tensor, cut)
        if point not in COVERING:
            yield pytest.param(point, id=point.name, marks=pytest.mark.full)


@functools.lru_cache(maxsize=4)
def on_one_device(model, layers, micro, ranks):
    return plain(case_of(model, layers), micro, "sgd", ranks=ranks)


@pytest.mark.default_cases(
    "modelllama-layers6-schedule1f1b-pipe4-stage3-micro4-recomputelayers-gatherstep-tensor2"
)
@pytest.mark.parametrize("point", [*grid()])
def test_a_pipeline_trains_as_one_device(point):
    case = case_of(point.model, point.layers)
    ours = run(case, point.stage, point.micro, "sgd", **point.sections)
    reference = on_one_device(point.model, point.layers, point.micro, point.ranks)
    assert_losses_equal(ours, reference, 1e-5)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, reference) <= 1e-5
    assert max(leaf_differences(case, ours, reference).values()) <= 1e-5


def pairs(first, second, points=COVERING):
    return {(getattr(p, first), getattr(p, second)) for p in points}


def test_the_covering_points_hold_every_pair():
    assert len(COVERING) >= 24
    assert {p.schedule for p in ALWAYS} == {*SCHEDULES}
    assert {p.stage for p in ALWAYS} == {0, 1, 3}
    assert {p.model for p in ALWAYS} == {"llama", "vit"}
    assert pairs("schedule", "pipe") == {*itertools.product(SCHEDULES, PIPE)}
    assert pairs("pipe", "stage") == {*itertools.product(PIPE, STAGES)}
    assert pairs("schedule", "stage") == {*itertools.product(SCHEDULES, STAGES)}
    assert pairs("stage", "recompute") == {*itertools.product(STAGES, RECOMPUTES)}
    assert pairs("schedule", "recompute") == {*itertools.product(SCHEDULES, RECOMPUTES)}
    stage3 = [p for p in COVERING if p.stage == 3]
    assert pairs("gather", "recompute", stage3) == {*itertools.product(GATHERS, RECOMPUTES)}
    assert {p.model for p in COVERING} == {"gpt2", "llama", "vit"}
    assert pairs("tensor", "cut") == {(1, False), (2, False), (2, True)}
    one_f_one_b = [p for p in COVERING if p.schedule == "1f1b"]
    assert {p.micro % p.pipe == 0 for p in one_f_one_b} == {True, False}


# -- losses that weigh micro-batches differently, and means ---------------------------------------


def masked(rng, samples):
    """Whole micro-batches count nothing, the first one among them: 4 micro-batches, 2 ranks."""
    batch = language(rng, samples)
    of_rank = np.arange(samples) % (samples // 2)
    micro = of_rank // (samples // 8)
    batch["mask"] = batch["mask"] * np.isin(micro, (1, 3))[:, None].astype(np.int32)
    return batch


def mean_loss(model, batch):
    """A scalar, whatever the mask says."""
    logits = model(batch["tokens"][:, :-1])
    shares = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(shares, batch["tokens"][:, 1:, None], axis=-1))


LOSSES = {
    "nothing counts in some": replace(case_of("llama", 5), sample=masked),
    "a mean": replace(case_of("gpt2", 5), loss=mean_loss),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("nothing counts in some", "1f1b"),
        pytest.param("a mean", "1f1b", marks=pytest.mark.full),
        pytest.param("nothing counts in some", "gpipe", marks=pytest.mark.full),
        pytest.param("a mean", "gpipe", marks=pytest.mark.full),
    ],
)
def test_micro_batches_weigh_what_the_loss_says(name, schedule):
    case = LOSSES[name]
    point = Point("", 5, schedule, 4, 2, 4)
    ours = run(case, point.stage, point.micro, "sgd", steps=4, **point.sections)
    reference = plain(case, point.micro, "sgd", ranks=point.ranks, steps=4)
    assert_losses_equal(ours, reference, 1e-5)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=1e-5)
    assert max(leaf_differences(case, ours, reference).values()) <= 1e-5


@pytest.mark.full  # test_pipeline_engine.py has a step in each precision
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_a_step_agrees_with_the_step_on_one_device(precision):
    point = Point("llama", 6, "1f1b", 4, 3, 4, tensor=2, cut=True)
    case = case_of(point.model, point.layers)
    sections = {**point.sections, precision: {"enabled": True}}
    ours = run(case, point.stage, point.micro, "sgd", steps=0, **sections)
    report = ours.engine.check(case.batches(point.micro)[0])
    assert report.ok, str(report)
