"""Real checkpoints: ten further steps here are ten further steps of DeepSpeed or torch."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.interop.exporting import export, hf_form
from jaxspeed.interop.torch_runs import table_in

pytestmark = pytest.mark.sampled

BEFORE, AFTER, SAMPLES, VOCAB, EMBED, HEADS, KV_HEADS, LAYERS = 5, 10, 8, 96, 32, 4, 2, 2
SIZES = {
    "vocab_size": VOCAB, "hidden_size": EMBED, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
ADAM = {"lr": 1e-3, "weight_decay": 0.1}
WARMUP = {"type": "WarmupLR", "params": {
    "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 20, "warmup_type": "linear",
}}  # fmt: skip
# Of a parameter here the tensor in torch, and its layout there, written out.
LAYOUTS = {
    "embed/table": ("model.embed_tokens.weight", lambda x: x),
    "head/table": ("lm_head.weight", lambda x: x),
    "norm/scale": ("model.norm.weight", lambda x: x),
    "blocks/attn_norm/scale": ("input_layernorm.weight", lambda x: x),
    "blocks/mlp_norm/scale": ("post_attention_layernorm.weight", lambda x: x),
    "blocks/attn/q_proj/kernel": (
        "self_attn.q_proj.weight", lambda x: x.T.reshape(EMBED, HEADS, -1)),
    "blocks/attn/k_proj/kernel": (
        "self_attn.k_proj.weight", lambda x: x.T.reshape(EMBED, KV_HEADS, -1)),
    "blocks/attn/v_proj/kernel": (
        "self_attn.v_proj.weight", lambda x: x.T.reshape(EMBED, KV_HEADS, -1)),
    "blocks/attn/o_proj/kernel": (
        "self_attn.o_proj.weight", lambda x: x.T.reshape(HEADS, -1, EMBED)),
    "blocks/mlp/gate/kernel": ("mlp.gate_proj.weight", lambda x: x.T),
    "blocks/mlp/up/kernel": ("mlp.up_proj.weight", lambda x: x.T),
    "blocks/mlp/down/kernel": ("mlp.down_proj.weight", lambda x: x.T),
}  # fmt: skip
MAP = """
from dataclasses import replace
from jaxspeed.models.llama_hf import table as family

def table(sizes):
    last = sizes.num_hidden_layers
    names = {
        "model.embed_tokens.weight": "0.weight",
        "model.norm.weight": f"{last + 1}.weight",
        "lm_head.weight": f"{last + 2}.weight",
    }
    def of_pipeline(rule):
        name = rule.tensor.replace("model.layers.{layer}", "{layer}.layer")
        return replace(rule, tensor=names.get(name, name), first={"layer": 1})
    known = family(sizes)
    return replace(known, rules=[of_pipeline(rule) for rule in known.rules], prefix="")
"""


def batches():
    draw = random.Random(0)
    return [
        [[draw.randrange(VOCAB) for _ in range(17)] for _ in range(SAMPLES)]
        for _ in range(BEFORE + AFTER)
    ]


def deepspeed_config(stage, **more):
    return {
        "train_batch_size": SAMPLES, "gradient_clipping": 1.0, "scheduler": WARMUP,
        "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
        "zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False, **more,
    }  # fmt: skip


def engine(**more):
    """Of 8 devices: stage 3, tensor 2, pipe 2."""
    config = {
        "model": {"family": "llama", "config": SIZES}, "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": ADAM}, "scheduler": WARMUP,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "mesh": {"data": 2, "tensor": 2, "pipe": 2}, **more,
    }  # fmt: skip
    return jaxspeed.initialize(config=config)


def assert_same_state(engine, values, name_of=lambda name, layer: name):
    """Masters and moments, bit by bit."""
    adam = engine.state.opt[0]
    masters = engine.state.master or engine.state.params
    for path, (name, layout) in LAYOUTS.items():
        for suffix, of in (("", masters), ("|exp_avg", adam.mu), ("|exp_avg_sq", adam.nu)):
            here = of
            for part in path.split("/") if suffix else [path]:
                here = here[part]
            full = [name_of(f"model.layers.{i}.{name}", i) for i in range(LAYERS)]
            if path.startswith("blocks/"):
                there = np.stack([layout(values[n + suffix]) for n in full])
            else:
                there = layout(values[name_of(name, None) + suffix])
            x = np.asarray(here)[tuple(map(slice, there.shape))]
            assert x.dtype == there.dtype
            np.testing.assert_array_equal(x, there, err_msg=path + suffix)


def continued(engine, steps=range(BEFORE, BEFORE + AFTER)):
    tokens = [np.array(batch) for batch in batches()]
    return [float(engine.train_batch({"tokens": tokens[i]})["loss"]) for i in steps]


def trained(references, folder, kind, config, **options):
    return references.call(
        "torch_runs.trained", folder=folder, kind=kind, batches=batches(), saved_at=BEFORE,
        sizes=SIZES, config=config, **options,
    )  # fmt: skip


OTHER = os.environ.get("JAXSPEED_DEEPSPEED")  # a folder of another version of DeepSpeed


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "other",
    ["", pytest.param(OTHER, marks=pytest.mark.skipif(not OTHER, reason="no JAXSPEED_DEEPSPEED"))],
    ids=["pinned", "another version"],
)
def test_a_run_of_deepspeed_continues(references, tmp_path, stage, other):
    theirs = trained(
        references, tmp_path, "deepspeed", deepspeed_config(stage), deepspeed=other,
        universal=stage == 1,
    )  # fmt: skip
    assert bool(other) == (theirs["version"] != "0.19.6"), theirs["version"]
    ours = engine(gradient_clipping=1.0)
    folders = [tmp_path, tmp_path / "universal"][: 1 + (stage == 1)]
    for folder in folders:
        ours.import_run(folder)
        assert_same_state(ours, theirs["values"])
    assert (int(ours.state.step), int(ours.state.opt[2].count)) == (BEFORE, BEFORE)
    np.testing.assert_allclose(continued(ours), theirs["losses"][BEFORE:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_of_a_run_in_bf16_are_read_bit_by_bit(references, tmp_path, stage):
    bf16 = {"bf16": {"enabled": True}}
    theirs = trained(references, tmp_path, "deepspeed", deepspeed_config(stage, **bf16))
    ours = engine(gradient_clipping=1.0, **bf16)
    ours.import_run(tmp_path)
    assert_same_state(ours, theirs["values"])
    np.testing.assert_allclose(continued(ours), theirs["losses"][BEFORE:], atol=2e-3, rtol=0)


def of_pipeline(name, layer):
    names = {"model.embed_tokens.weight": 0, "model.norm.weight": LAYERS + 1}
    if layer is None:
        return f"{names.get(name, LAYERS + 2)}.weight"
    return name.replace(f"model.layers.{layer}", f"{layer + 1}.layer")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_of_deepspeed_continues_by_a_table(references, tmp_path, stage, caplog):
    config = deepspeed_config(stage, train_micro_batch_size_per_gpu=SAMPLES)
    theirs = trained(references, tmp_path, "pipeline", config)
    (tmp_path / "map.py").write_text(MAP)
    ours = engine(gradient_clipping=1.0)
    ours.import_run(tmp_path, table_in(tmp_path / "map.py"))
    if stage == 1:
        assert_same_state(ours, theirs["values"], of_pipeline)
        np.testing.assert_allclose(continued(ours), theirs["losses"][BEFORE:], atol=1e-4, rtol=0)
    else:  # its optimizer has no names: the weights alone
        assert "whose state goes by the parameters' numbers" in caplog.text
        first = np.asarray(ours.state.params["embed/table"])
        np.testing.assert_array_equal(first, theirs["values"]["0.weight"])
        assert int(ours.state.step) == 0
        np.testing.assert_allclose(continued(ours)[0], theirs["losses"][BEFORE], atol=1e-4)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat, as torchtitan"])
def test_a_run_of_fsdp2_continues_and_goes_back(references, tmp_path, flat):
    theirs = trained(references, tmp_path / "run", "dcp", ADAM, flat=flat)
    ours = engine()
    ours.import_run(tmp_path / "run" / "saved")
    assert_same_state(ours, theirs["values"])
    half = range(BEFORE, BEFORE + AFTER // 2)
    losses = continued(ours, half)
    ours.save_checkpoint(tmp_path / "saved")
    ours.wait()
    export(
        tmp_path / "saved", tmp_path / "exported", moments=True,
        form=hf_form(ours.config, ours.program.source.model),
    )  # fmt: skip
    losses += continued(ours, range(half.stop, BEFORE + AFTER))
    np.testing.assert_allclose(losses, theirs["losses"][BEFORE:], atol=1e-4, rtol=0)
    back = references.call(
        "torch_runs.trained", folder=tmp_path / "back", kind="dcp", config=ADAM, sizes=SIZES,
        batches=batches()[half.stop :], saved_at=0, exported=str(tmp_path / "exported"),
        position=half.stop,
    )  # fmt: skip
    np.testing.assert_allclose(back["losses"], theirs["losses"][half.stop :], atol=1e-4, rtol=0)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, x in back["values"].items():
        parameter, _, key = name.partition("|")
        at = f"state.{parameter}.{key}" if key else parameter
        np.testing.assert_array_equal(x, exported[at], err_msg=at)


def test_the_command_begins_a_run(references, tmp_path):
    from jaxspeed.cli.main import main

    theirs = trained(references, tmp_path / "theirs", "deepspeed", deepspeed_config(2))
    config = Path(tmp_path / "config.yaml")
    config.write_text(
        f"""
model: {{family: llama, config: {SIZES!r}}}
data: {{source: synthetic, vocab_size: {VOCAB}, seq_len: 16}}
train_batch_size: {SAMPLES}
optimizer: {{type: AdamW, params: {ADAM!r}}}
gradient_clipping: 1.0
run: {{steps: 7, compilation_cache: false, sample_tokens: 0}}
""".replace("True", "true").replace("False", "false")
    )
    out = tmp_path / "run"
    theirs_at, config_at = str(tmp_path / "theirs"), str(config)
    assert main(["checkpoint", "import", theirs_at, str(out), "--config", config_at]) == 0
    assert (out / "checkpoints" / "step-00000005").is_dir()
    assert main(["checkpoint", "import", theirs_at, str(out), "--config", config_at]) == 2
    assert main(["train", str(out), "--quiet"]) == 0
    assert (out / "checkpoints" / "step-00000007").is_dir()
    del theirs
