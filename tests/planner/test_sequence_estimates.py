"""What a plan says of a step whose sequences are sharded over `seq`."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxspeed
from jaxspeed.axes import axis_names
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.search.analytic_cost import CostModel
from jaxspeed.planner.search.candidate import choice_of
from jaxspeed.planner.search.model_sizes import sizes_of
from jaxspeed.planner.time.infer_collectives import infer_collectives
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.trace_ir import all_ops
from jaxspeed.planner.trace.traced_step import on_chip
from jaxspeed.train.build import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.sequence import tiny_llama

SAMPLES, SEQ = tiny_llama.SAMPLES, tiny_llama.SEQ


def program(mesh, stage=3, **more):
    config = Config.load(tiny_llama.config(stage, mesh=mesh, **more))
    built = build_program(config, *resolve_model(config))
    row = jax.ShapeDtypeStruct((SAMPLES, SEQ), jnp.int32)
    return built, {"tokens": row, "targets": row}


def test_only_ulysses_and_parameters_are_exchanged_where_a_sequence_is_in_tiles():
    """As XLA:TPU's program of a Llama of 2 layers has it."""
    tiled = {"remat": "full", "sequence_tiles": 2, "sequence": {"kind": "ulysses"}}
    built, batch = program({"seq": 4, "data": 2}, parallel=tiled)
    (phase,) = read_step(built, batch, "tpu").phases
    assert not any("eval_jaxpr" in op.name for op in all_ops(phase.scope))  # its loops are seen
    moved = infer_collectives(phase)
    found = [each.communication for each in moved if each.communication.purpose == "activations"]
    small = SAMPLES * SEQ * 4  # bytes of the tokens of a micro-batch
    assert not [c for c in found if c.kind == "all-gather" and c.bytes > small]
    sizes = tiny_llama.SIZES
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    keys = max(sizes["num_key_value_heads"], 4)  # repeated, so that each device has one
    # q, k, v and the result, in three passes: forward, recomputed, and their gradients.
    passes = 3 * (2 * heads + 2 * keys)
    exchanged = sum(c.payload for c in found if (c.kind, c.axes) == ("all-to-all", ("seq",)))
    width = sizes["hidden_size"] // heads
    assert exchanged == layers * passes * SAMPLES * SEQ * width * 4 / 8


def plan_of(**more):
    sizes = {**tiny_llama.SIZES, "max_position_embeddings": SEQ}
    model = {"family": "llama", "preset": "tiny", "config": sizes}
    data = {"source": "synthetic", "seq_len": SEQ}
    given = tiny_llama.config(3, mesh={"seq": 4, "data": 2}, model=model, data=data, **more)
    return jaxspeed.plan(given, compile=False)


def test_a_plan_says_how_each_attention_runs_and_why():
    found = plan_of()
    (run,) = found.figures()["attention"]["runs"]
    assert run["layers"] == tiny_llama.SIZES["num_hidden_layers"]
    assert (run["kind"], run["order"]) == ("gather", "zigzag")
    # Formulas of the issue: gather 2 g N h (P - 1) / P, in units of N h.
    assert "a device receives least" in run["why"] and "gather 3" in run["why"]
    assert "attention (2 layers): gather, zigzag: a device receives least" in str(found)
    assert json.loads(json.dumps(found.figures()))["attention"]["devices"] == 4


def test_the_links_of_the_target_decide_in_a_plan():
    built, batch = program({"seq": 4, "data": 2})
    with on_chip(target_of("v5p:2x2x2").chip):
        assert "ms forward per sample on v5p" in built.attention_report(batch).runs[0].why
    with on_chip(target_of("cpu:8").chip):
        assert "a device receives least" in built.attention_report(batch).runs[0].why


def test_a_plan_refuses_a_kind_before_its_step_is_traced():
    with pytest.raises(ConfigError, match="6 query heads"):
        sizes = {**tiny_llama.SIZES, "num_attention_heads": 6, "head_dim": 4}
        model = {"family": "llama", "preset": "tiny", "config": sizes}
        built, batch = program({"seq": 8}, model=model, parallel={"sequence": {"kind": "ulysses"}})
        built.attention_report(batch)


def test_the_search_counts_a_shard_of_activations_and_their_exchange():
    """Of seq 1, 2, 4: activations / seq; 12 arrays like a unit's input, (P - 1) / P of each."""
    built, _ = program({"data": 8})
    sample = {name: jax.ShapeDtypeStruct((1, SEQ), jnp.int32) for name in ("tokens", "targets")}
    sizes, target = sizes_of(built, sample), target_of("h100:8")
    model = CostModel(sizes, target, lambda mesh: None, samples=8, tokens=SEQ, peak=1e15)
    choices = [replace(choice_of(built.config, 8), mesh=axes(8 // n, n)) for n in (1, 2, 4)]
    device, host = zip(*(model._activations(each) for each in choices), strict=True)
    assert device == pytest.approx([device[0] / n for n in (1, 2, 4)]) and set(host) == {0}
    speed = target.chip.link * target.chip.links
    for n, each in zip((1, 2, 4), choices, strict=True):
        shard = sizes.unit_inputs / n * each.micro * each.accumulation(8)
        exchanged = 3 * 4 * shard * (n - 1) / n / speed
        assert model._of_attention(each, each.accumulation(8)) == pytest.approx(exchanged)


def axes(data, seq):
    return tuple({"data": data, "seq": seq}.get(axis, 1) for axis in axis_names())
