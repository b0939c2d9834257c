"""What a plan says of a step whose sequences are sharded over `seq`."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.config import Config
from jaxspeed.planner.time.infer_collectives import infer_collectives
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.trace_ir import all_ops
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
    step = read_step(built, batch, "tpu")
    assert not any("eval_jaxpr" in op.name for op in all_ops(step.scope))  # its loops are seen
    moved = infer_collectives(step.scope, step.sizes, step.kinds, step.state)
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
