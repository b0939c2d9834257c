"""No shipped config has an array as large as its attention scores in its step for any GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.config import Config
from jaxspeed.hardware.known_chips import chips_of
from jaxspeed.ops import gpu, triton
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.op_cost import KERNELS
from jaxspeed.planner.trace.trace_ir import all_ops
from jaxspeed.train.build import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.support.covering import covering
from tests.test_configs import CONFIGS, SMALL

GPUS = {
    chip.capability for chip in chips_of().values() if chip.platform == "cuda" and chip.compiles
}
# For these 8 devices and two layers; a pipeline is among them.
OTHER_MESH = {
    "gpt_1t.yaml": {"mesh": {"pipe": 2, "tensor": 4}, "gradient_accumulation_steps": 2},
    "deepseek_v3.yaml": {"mesh": {"expert": 8}},
    "long_8b_500k.yaml": {"mesh": {"seq": 8}},
}
MORE = 144  # tokens, so that no other dim of a model is as long as the sequence
LONG = ["gpt2_small.yaml", "gpt2_xl.yaml", "gpt3_175b.yaml", "gpt_1t.yaml"]
LONG += ["llama3_70b.yaml", "llama3_8b.yaml", "tiny.yaml", "gpt2_tiny_zero3.json"]
LONG += ["long_8b_128k.yaml", "long_8b_500k.yaml", "mixtral_8x7b.yaml"]
LONG += ["qwen3_30b_a3b.yaml", "deepseek_v3.yaml"]
SHORT = [
    "offload_tiny.yaml",
    "vit_tiny.yaml",
    "dpo_tiny.yaml",
    "reward_tiny.yaml",
    "tiny_moe.yaml",
    "vlm_tiny.yaml",
]  # a row of scores is shorter than a kernel's block


LENGTH_OF_TINY = 128  # the longest that its model takes


@functools.cache
def config_of(name):
    given = Config.load(CONFIGS[name]).given
    data = given.setdefault("data", {"source": "stdlib", "tokenizer": "bytes"})
    seq = data.get("seq_len", LENGTH_OF_TINY)
    own = {"num_hidden_layers": 2, "max_position_embeddings": seq + MORE}
    data["seq_len"] = seq + MORE
    given["model"]["config"] = given["model"].get("config", {}) | own
    return Config.load(given | OTHER_MESH.get(name, {}))


def score_buffers(name, capability, packed):
    """Arrays as large as the scores in the step of two layers, for 8 GPUs that are not here.

    In the step as it is traced: what is lowered from it has the branches of all platforms, of which
    the compiler removes the others.
    """
    config = config_of(name)
    seq = config.data.seq_len
    with gpu.assumed(capability):
        program = build_program(config, *resolve_model(config), devices=jax.devices()[:8])
        rows = jax.ShapeDtypeStruct((program.batch.train, seq + 1), jnp.int32)
        batch = {"tokens": rows} | ({"segment_ids": rows} if packed else {})
        (step,) = read_step(program, batch, "cuda").phases
    ops = list(all_ops(step.scope))
    assert (capability >= (8, 0)) == any(op.name.startswith(KERNELS) for op in ops)
    return [v.shape for op in ops for v in op.outs if v.shape.count(seq) > 1]


def test_every_config_is_tried_on_every_gpu():
    assert sorted(LONG + SHORT) == sorted(SMALL)
    assert Config.load(CONFIGS["offload_tiny.yaml"]).data.seq_len < triton.SHORTEST
    assert {(8, 0), (8, 9), (9, 0), (10, 0)} == GPUS


EVERY = [(name, c, packed) for name in LONG for c in sorted(GPUS) for packed in (False, True)]


@pytest.mark.parametrize(
    ("name", "capability", "packed"),
    covering(EVERY, [("llama3_8b.yaml", (9, 0), True), ("gpt2_small.yaml", (8, 0), True)]),
)
def test_no_array_of_a_step_is_as_large_as_its_scores(name, capability, packed):
    assert not score_buffers(name, capability, packed)


def test_it_would_be_seen():
    """Before Ampere there is no kernel."""
    assert score_buffers("tiny.yaml", (7, 0), True)
