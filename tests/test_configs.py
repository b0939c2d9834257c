"""The configs of this repository run as they stand."""

import functools
from pathlib import Path

import numpy as np
import pytest

import jaxspeed
from jaxspeed.run import train
from tests.engine.tiny import Listed, batch, squared_error

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {path.name: path for path in sorted((ROOT / "configs").iterdir())}


def falls(engine, data, steps):
    losses = [float(engine.train_batch(data)["loss"]) for _ in range(steps)]
    return np.isfinite(losses).all() and losses[-1] < losses[0]


# What makes a step of each fit a test: a few layers of a few units, and few tokens.
NARROW = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 512}
SMALL = {
    "tiny.yaml": {"num_hidden_layers": 1},
    "vit_tiny.yaml": {},
    "offload_tiny.yaml": {},
    "gpt2_tiny_zero3.json": {},
    "gpt2_small.yaml": NARROW | {"num_attention_heads": 4},
    "gpt2_xl.yaml": NARROW | {"num_attention_heads": 4, "num_hidden_layers": 2},
    "llama3_8b.yaml": NARROW
    | {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "long_8b_128k.yaml": NARROW
    | {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "long_8b_500k.yaml": NARROW
    | {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "llama3_70b.yaml": NARROW
    | {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
    "gpt3_175b.yaml": NARROW | {"num_attention_heads": 8, "num_hidden_layers": 2},
    "gpt_1t.yaml": NARROW | {"num_attention_heads": 8},
    "tiny_moe.yaml": {},
    "dpo_tiny.yaml": {},
    "reward_tiny.yaml": {},
    "vlm_tiny.yaml": {},
    "mixtral_8x7b.yaml": NARROW
    | {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_30b_a3b.yaml": NARROW
    | {"intermediate_size": 32, "num_attention_heads": 4, "num_experts": 16, "head_dim": 16},
    "deepseek_v3.yaml": NARROW
    | {
        "num_hidden_layers": 2, "num_dense_layers": 1, "intermediate_size": 64, "num_experts": 16,
        "moe_intermediate_size": 16, "num_attention_heads": 4, "q_lora_rank": 16,
        "kv_lora_rank": 16,
    },
}  # fmt: skip


MESHES = {"deepseek_v3.yaml": {"expert": 4}}  # of the 8 devices; else the config's own


def test_every_config_that_names_a_model_is_tried():
    models = {name: jaxspeed.Config.load(path).model for name, path in CONFIGS.items()}
    # tests/test_docs_fine_tuning.py runs the one that names a folder, and
    # tests/objectives/test_tiny_objectives.py that of a student, which needs its teacher's, and
    # that whose batches are sampled.
    named = {name for name, model in models.items() if model and not model.pretrained}
    named -= {"distill_tiny.yaml", "grpo_tiny.yaml"}
    assert named == set(SMALL)


# The others differ from these in their sizes, their family and how they are sharded.
COVERING = ("tiny.yaml",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in COVERING else pytest.mark.full) for n in SMALL],
)
def test_a_config_trains_a_small_model_as_it_trains_its_own(name, tmp_path):
    given = jaxspeed.Config.load(CONFIGS[name]).given
    run = {"steps": 2, "devices": "cpu:8", "output": str(tmp_path / "run"), "sample_tokens": 0}
    given["run"] = given.get("run", {}) | run | {"eval_batches": 1}
    given["model"]["config"] = given["model"].get("config", {}) | SMALL[name]
    given["mesh"] = MESHES.get(name, given.get("mesh", {}))
    if SMALL[name]:
        given["data"] |= {"tokenizer": "bytes", "seq_len": 16}
    reached = train(given).reached
    assert reached.step == 2 and np.isfinite([reached.train_loss, reached.eval_loss]).all()


@pytest.mark.full
def test_the_tiny_gpt2_trains_under_zero_3():
    engine = jaxspeed.initialize(config=CONFIGS["gpt2_tiny_zero3.json"])
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33)).astype(np.int32)
    assert engine.placements.stage == 3
    assert falls(engine, {"tokens": tokens}, 10)


def test_a_plain_deepspeed_config_trains_ones_own_model():
    model = functools.partial(Listed, layers=1)
    engine = jaxspeed.initialize(model, squared_error, CONFIGS["ds_config.json"])
    assert falls(engine, batch(32), 10)


@pytest.mark.full  # above it trains a model of one's own
def test_a_plain_deepspeed_config_trains_a_family_named_beside_it(tmp_path):
    """As docs/running.md has it."""
    run = {"steps": 2, "devices": "cpu:8", "output": str(tmp_path), "sample_tokens": 0}
    given = jaxspeed.Config.load(CONFIGS["ds_config.json"]).given
    model = {"family": "gpt2", "preset": "tiny"}
    reached = train(given | {"model": model, "run": run | {"eval_batches": 1}}).reached
    assert reached.step == 2 and np.isfinite([reached.train_loss, reached.eval_loss]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_of_a_config_is_refused(name):
    rows = jaxspeed.explain_config(CONFIGS[name])
    assert rows and all(row.verdict != "refused" for row in rows)
