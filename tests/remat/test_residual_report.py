"""The residual report shows what the config's remat keys save."""

import dataclasses

import jax
import numpy as np
import pytest
from jaxspeed.models import gpt2

from jaxspeed.config import Config
from jaxspeed.engine import compiled_report
from jaxspeed.placement.show import as_text
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.trace_ir import all_ops
from jaxspeed.remat.budget import ActivationShards
from jaxspeed.train.build import build_program

LAYERS, EMBED, SEQ, MICRO, DEVICES = 4, 32, 16, 2, 4
ONE = LAYERS * MICRO * SEQ * EMBED * 4  # bytes per device of one activation of this width
SIZES = gpt2.Config(
    hidden_size=EMBED,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=SEQ,
)


def program(remat, accumulation=1, sizes=SIZES, **sections):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": {"remat": remat},
        **sections,
    }
    return build_program(
        Config.load(config),
        lambda rngs: gpt2.build(sizes, rngs),
        gpt2.loss,
        devices=jax.devices()[:DEVICES],
    )


def batch_of(made):
    return {"tokens": jax.ShapeDtypeStruct((made.batch.train, SEQ + 1), np.int32)}


def residuals(remat, **more):
    made = program(remat, **more)
    return made.kept_report(batch_of(made))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_are_those_of_the_activations_shapes(accumulation):
    found = residuals("full", accumulation=accumulation)
    assert found.inputs == ONE == found.on_device
    sizes = {name: size for name, (size, _) in found.names.items()}
    assert sizes["query"] == sizes["key"] == sizes["attn_out"] == ONE
    assert sizes["mlp_up"] == sizes["mlp_hidden"] == 4 * ONE
    assert {place for _, place in found.names.values()} == {"recomputed"}


@pytest.mark.parametrize("seq", [2, 4])
def test_bytes_are_those_of_a_shard_of_each_sequence(seq):
    """As the traced step has them: what its forward loop stacks, by the shardings in it."""
    made = program({"save": ["query", "mlp_up"]}, mesh={"seq": seq, "data": DEVICES // seq})
    (step,) = read_step(made, batch_of(made)).phases
    stacked = [
        out
        for op in all_ops(step.scope)
        if op.name == "scan" and not op.backward
        for out in op.outs
        if out.shape[:3] == (LAYERS, made.batch.train, SEQ)
    ]
    assert len(stacked) == 3
    assert made.kept_report(batch_of(made)).on_device == sum(map(step.sizes.plain, stacked))


def test_what_has_no_positions_is_not_divided_by_the_axis():
    shards = ActivationShards(samples=2, positions=4, lengths=frozenset([SEQ]))
    shapes = [(8, SEQ, EMBED), (8, 4, SEQ), (8, EMBED), (SEQ, EMBED)]
    jaxpr = jax.make_jaxpr(lambda *x: x)(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes))
    found = [shards.bytes_of([v]) for v in jaxpr.jaxpr.invars]
    parts = [8, 8, 2, 2]
    assert found == [np.prod(s) * 4 // n for s, n in zip(shapes, parts, strict=True)]


def test_lists_determine_where_each_name_is_saved():
    found = residuals({"save": ["query"], "offload": ["mlp_up"], "recompute": ["key"]})
    places = {name: place for name, (_, place) in found.names.items()}
    assert places.pop("query") == "device"
    assert places.pop("mlp_up") == "host"
    assert set(places.values()) == {"recomputed"}
    assert found.on_device == 2 * ONE


def test_saved_activations_spare_flops():
    again = [
        residuals(remat).recomputed_flops
        for remat in ("full", "attention", {"save": ["mlp_up", "attention"]})
    ]
    assert again[0] > again[1] > again[2] > 0


def test_a_budget_reports_its_choice_and_stays_within():
    budget = 5 * ONE
    found = residuals({"budget": budget})
    assert found.budget == budget
    assert ONE < found.on_device <= budget
    named = sum(size for size, place in found.names.values() if place == "device")
    assert found.on_device == ONE + named


def test_every_second_input_is_half_of_them():
    assert residuals({"every_n": 2}).inputs == ONE // 2


def test_inputs_in_host_memory_are_not_on_the_device():
    found = residuals("attention", activation_checkpointing={"cpu_checkpointing": True})
    assert found.inputs_at == "host"
    assert found.on_device == 0
    assert found.names["attention"][1] == "host"


def test_a_part_of_each_saved_activation_is_on_the_device():
    part = {"cpu_checkpointing": True, "cpu_checkpointing_ratio": 0.25}
    found = residuals({"save": ["query"], "offload": ["mlp_up"]}, activation_checkpointing=part)
    assert found.inputs_at == found.names["query"][1] == "split"
    assert found.names["mlp_up"][1] == "host", "a list offloads all of it"
    assert found.on_device == 0.75 * 2 * ONE
    assert "host memory: 25%" in as_text(found, 100)


def test_a_budget_below_the_inputs_offloads_a_part_of_them():
    found = residuals({"budget": ONE // 2})
    assert found.inputs_at == "split"
    assert 0.5 < found.host_ratio < 0.6
    assert found.on_device <= ONE // 2
    assert residuals({"budget": 1}).inputs_at == "host"


@pytest.mark.parametrize(("unroll", "barriers"), [(1, False), (2, False), (3, True), (True, True)])
def test_recomputation_of_unrolled_layers_is_kept_apart(unroll, barriers):
    """Trips outside of a loop stand beside their backward pass, with which XLA would merge them."""
    made = program("full", sizes=dataclasses.replace(SIZES, unroll=unroll))
    traced = made.step.trace(made.state, made.abstract_batch(batch_of(made)))
    # Not for CPUs, whose weight gradients have barriers of their own (`ops/cpu_products.py`).
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("optimization_barrier" in text) == barriers


def test_no_report_without_a_policy_with_names():
    assert residuals("none") is None
    assert residuals("dots") is None, "matmuls with weights have no names"


@pytest.mark.sampled
def test_the_report_of_a_compiled_step_has_it():
    made = program({"budget": 5 * ONE})
    report = compiled_report(made, batch_of(made))
    assert report.kept == residuals({"budget": 5 * ONE})
    assert "of a budget of 81.9 kB" in str(report)
