"""The collectives inferred from a traced step, against those of the compiled one and formulas."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.config import Config
from jaxspeed.hlo.collectives import collectives
from jaxspeed.planner.time.infer_collectives import infer_collectives
from jaxspeed.planner.trace import read_step
from jaxspeed.train.build import build_program
from jaxspeed.user_models.config_model import resolve_model

LAYERS, WIDTH, SEQ, SAMPLES = 4, 64, 128, 2
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 192,
    "vocab_size": 512,
    "max_position_embeddings": SEQ,
}
ACCUMULATION = {"gradient_accumulation_steps": 4}
STAGES = {"gradient_accumulation_steps": 8}


def zero(stage):
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


WAYS = {
    "stage 0": zero(0),
    "stage 0, accumulation": {**zero(0), **ACCUMULATION},
    "stage 3": zero(3),
    "tensor 4": {"mesh": {"tensor": 4}},
    "pipe 2, tensor 2": {"mesh": {"pipe": 2, "tensor": 2}, **STAGES},
}
# XLA:CPU all-reduces scattered sums, so both count as one. (Sums of partial sums over `tensor`,
# which XLA:TPU reduces together, it reduces one by one: formulas hold those.)
COMPARED = (
    ("stage 0", "reduce", ("data",)),
    ("stage 0, accumulation", "reduce", ("data",)),
    ("stage 3", "reduce", ("data",)),
    ("stage 3", "all-gather", ("data",)),
    ("stage 3", "all-to-all", ("data",)),
    ("tensor 4", "reduce", ("data",)),
    *(
        pytest.param("pipe 2, tensor 2", which, axes, marks=pytest.mark.full)
        for which, axes in (
            ("reduce", ("pipe",)),
            ("reduce", ("pipe", "tensor")),
            ("permute", ("pipe",)),
        )
    ),
)


def kind(name):
    return "reduce" if name in ("all-reduce", "reduce-scatter") else name.replace("collective-", "")


@functools.cache
def program(way):
    config = Config.load(
        {
            "model": {"family": "llama", "config": SIZES},
            "train_micro_batch_size_per_gpu": SAMPLES,
            "bf16": {"enabled": False},  # a CPU widens it
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": 1.0,
            **WAYS[way],
        }
    )
    built = build_program(config, *resolve_model(config))
    shape = (built.batch.train, SEQ + 1)
    return built, built.abstract_batch({"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)})


@functools.cache
def read(way):
    (phase,) = read_step(*program(way), "cpu").phases
    found = infer_collectives(phase)
    return [each.communication for each in found]


@functools.cache
def compiled(way):
    built, batch = program(way)
    text = built.step.lower(built.state, batch).compile().as_text()
    found = Counter()
    for each in collectives(text, built.mesh):
        found[kind(each.kind), each.axes] += each.elements * each.runs
    return found


@pytest.mark.default_cases("stage 3-reduce-axes2")
@pytest.mark.parametrize(("way", "which", "axes"), COMPARED)
def test_inferred_collectives_are_those_of_the_compiled_step(way, which, axes):
    elements = sum(m.payload / 4 for m in read(way) if kind(m.kind) == which and m.axes == axes)
    assert elements == pytest.approx(compiled(way)[which, axes], rel=0.02)
    assert elements > 2000


def parameters(way):
    return sum(x.size for x in jax.tree.leaves(program(way)[0].state.params))


def test_stage_3_gathers_parameters_twice_and_scatters_gradients_once():
    gathered = sum(m.payload for m in read("stage 3") if m.purpose == "parameters")
    scattered = sum(m.payload for m in read("stage 3") if m.purpose == "gradients")
    table = SIZES["vocab_size"] * WIDTH  # the embedding's rows are looked up where they lie
    assert gathered == pytest.approx(4 * 2 * (parameters("stage 3") - table), rel=0.05)
    assert scattered == pytest.approx(4 * (parameters("stage 3") - table), rel=0.05)


def test_tensor_parallelism_reduces_an_activation_four_times_a_layer():
    """Megatron-LM (arXiv:1909.08053): two in the forward pass, two in the backward pass."""
    activation = SAMPLES * SEQ * WIDTH * 4
    runs = sum(
        m.runs
        for m in read("tensor 4")
        if m.kind == "all-reduce" and m.axes == ("tensor",) and m.bytes == activation
    )
    assert runs - 4 * LAYERS in (1, 2)  # and at the embedding and the head


def test_accumulated_gradients_are_reduced_once_a_step():
    once = sum(m.payload for m in read("stage 0") if m.purpose == "gradients")
    assert once == pytest.approx(4 * parameters("stage 0"), rel=0.01)
    several = [m for m in read("stage 0, accumulation") if m.axes == ("data",)]
    assert sum(m.payload for m in several) == pytest.approx(once, rel=0.01)
