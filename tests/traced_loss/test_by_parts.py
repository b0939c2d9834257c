"""The losses that come with jaxspeed, and those of the tests' models, are sums over samples."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed import models
from jaxspeed.config import Config
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.trace.traced_step import as_on
from jaxspeed.train.build import build_program
from tests.support.covering import covering
from tests.train.cases import CASES

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
MODELS = {
    "gpt2": ("gpt2", {}),
    "chunked head": ("gpt2", {"vocab_chunk": 32, "tie_word_embeddings": True}),
    "dropout": ("gpt2", {"dropout": 0.1}),
    "llama": ("llama", {"num_key_value_heads": 1, "intermediate_size": 128}),
    "unrolled": ("llama", {"num_key_value_heads": 2, "intermediate_size": 128, "unroll": True}),
    "gemma": (
        "gemma",
        {
            "num_key_value_heads": 1,
            "intermediate_size": 128,
            "head_dim": 64,
            "sliding_window": 64,
        },
    ),
}
TARGETS = ("cpu", "v5e:2x2", "h100:4", "a100-80g:4")
INPUTS = ("plain", "masked", "packed")
POINTS = [
    (name, target, given, precision)
    for name in MODELS
    for target in TARGETS
    for given in INPUTS
    for precision in ("fp32", "bf16", "autocast")
]
DEFAULT = [
    ("gpt2", "cpu", "masked", "bf16"),
    ("chunked head", "v5e:2x2", "packed", "autocast"),
    ("dropout", "h100:4", "plain", "fp32"),
    ("llama", "a100-80g:4", "packed", "fp32"),
    ("unrolled", "h100:4", "masked", "bf16"),
    ("gemma", "v5e:2x2", "packed", "bf16"),
    ("gemma", "cpu", "plain", "autocast"),
]
PRECISION = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
SEQ = 128


def shapes(given, samples):
    arrays = {"tokens": jax.ShapeDtypeStruct((samples, SEQ + 1), jnp.int32)}
    if given == "masked":
        arrays["mask"] = jax.ShapeDtypeStruct((samples, SEQ), jnp.int32)
    if given == "packed":
        for name in ("segments", "positions"):
            arrays[name] = jax.ShapeDtypeStruct((samples, SEQ + 1), jnp.int32)
    return arrays


def by_parts_of(program, batch):
    index = jax.ShapeDtypeStruct((), jnp.int32)
    rest = (program.state.variables, batch, index, index)
    return program.in_mesh(lambda: program.traced_loss.by_parts(rest, train=True))()


@pytest.mark.parametrize(("name", "target", "given", "precision"), covering(POINTS, DEFAULT))
def test_a_language_models_loss_is_a_sum_over_samples(name, target, given, precision):
    family, sizes = MODELS[name]
    built = models.build(family, None, {**SIZES, **sizes})
    config = Config(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=2,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        **PRECISION[precision],
    )
    chip = None if target == "cpu" else target_of(target).chip
    platform, capability = (chip.platform, chip.capability) if chip else ("cpu", None)
    with as_on(platform, capability):
        program = build_program(config, built.factory, built.loss, devices=jax.devices()[:4])
        found = by_parts_of(program, shapes(given, 4))
    assert found.not_once is None
    assert found.draws is (name == "dropout")


NORMALIZED = {"linen", "batch statistics", "called twice", "unlike blocks"}  # by a BatchNorm


@pytest.mark.parametrize("name", CASES)
def test_losses_of_the_tests_models(name):
    case = CASES[name]
    batch = case.batches(2, steps=1)[0]
    config = Config(
        train_batch_size=len(jax.tree.leaves(batch)[0]),
        gradient_accumulation_steps=2,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
    )
    example = case.example if case.example is not None else batch
    program = build_program(config, case.model, case.loss, example_batch=example)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) // 2, *x.shape[1:]), x.dtype), batch)
    found = by_parts_of(program, half)
    assert bool(found.mixes) is (name in NORMALIZED), found.mixes
