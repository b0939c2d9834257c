"""Folders written with NumPy are read into shards and written again, without `transformers`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jaxspeed.models import build, from_pretrained

import jaxspeed
from jaxspeed.interop import HFForm, MappingTable, TensorRule, pretrained
from jaxspeed.interop.safetensors import TensorFile
from tests.interop import folders

SHARDED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "mesh": {"data": 4, "tensor": 2},
}


def engine(model, **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **more,
    }
    if isinstance(model, Path):
        model = {"pretrained": str(model)}
    if isinstance(model, dict):
        config["model"], model = model, None
    return jaxspeed.initialize(model, None, config)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), x, err_msg=name)


def read(folder):
    """All tensors of a folder."""
    files = [TensorFile.open(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: np.array(file.array(name)) for file in files for name in file.tensors}


@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_is_read_into_shards_and_written_again(tmp_path, files):
    tensors = folders.llama_tensors()
    source = folders.folder(tmp_path / "in", folders.LLAMA, tensors, files)
    (source / "generation_config.json").write_text("{}")
    (source / "modeling_llama.py").write_text("raise SystemExit")
    made = engine(source, **SHARDED)
    assert_same(made.parameters, folders.llama_parameters(tensors))
    before = jax.tree.leaves(made.state)
    made.save_pretrained(tmp_path / "out")
    assert_same(read(tmp_path / "out"), tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert folders.LLAMA.items() <= config.items()
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    made.train_batch({"tokens": np.ones((4, 9), np.int32)})
    assert all(leaf.is_deleted() for leaf in before), "what was read cannot be donated"


def test_a_padded_vocabulary_and_masters_are_read(tmp_path):
    tensors = folders.llama_tensors(folders.BF16)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:39]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:39]
    source = folders.folder(tmp_path, folders.LLAMA | {"vocab_size": 39}, tensors)
    for stage in (0, 2, 3):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        made = engine(source, bf16={"enabled": True}, mesh=SHARDED["mesh"], zero_optimization=zero)
        expected = folders.llama_parameters(tensors)
        assert_same(made.parameters, {p: x.astype(np.float32) for p, x in expected.items()})
        for path, x in made.state.params.items():
            found = np.asarray(x)[tuple(map(slice, expected[path].shape))]
            np.testing.assert_array_equal(found, expected[path])


def test_gpt2s_fused_projection_is_split_and_joined(tmp_path):
    tensors = folders.gpt2_tensors()
    source = folders.folder(tmp_path / "in", folders.GPT2, tensors)
    made = engine(source, **SHARDED)
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        fused = tensors["transformer.h.1.attn.c_attn.weight"][:, i * 16 : (i + 1) * 16]
        found = made.parameters[f"blocks/attn/{name}/kernel"][1]
        np.testing.assert_array_equal(found, fused.reshape(16, 4, 4))
    made.save_pretrained(tmp_path / "out")
    assert_same(read(tmp_path / "out"), tensors)


def test_bare_models_buffers_and_stored_tied_heads_are_read(tmp_path):
    tensors = folders.gpt2_tensors()
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.uint8)
    bare["lm_head.weight"] = bare["wte.weight"]
    made = engine(folders.folder(tmp_path, folders.GPT2, bare))
    np.testing.assert_array_equal(
        made.parameters["positions/table"], tensors["transformer.wpe.weight"]
    )


@pytest.mark.parametrize("dtype, bits", [("bf16", "bfloat16"), ("fp16", "float16")])
def test_an_export_is_cast(tmp_path, dtype, bits):
    tensors = folders.llama_tensors()
    made = engine(folders.folder(tmp_path / "in", folders.LLAMA, tensors))
    summary = made.save_pretrained(tmp_path / "out", dtype=dtype)
    assert_same(read(tmp_path / "out"), {n: x.astype(bits) for n, x in tensors.items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == bits
    assert summary.tensors == len(tensors)


def test_a_family_that_was_not_pretrained_is_exported_and_read_again(tmp_path):
    sizes = {"num_hidden_layers": 3, "qk_norm": True, "sliding_window": 7}
    for name, config in {"llama": sizes, "gpt2": {"tie_word_embeddings": False}}.items():
        made = engine({"family": name, "preset": "tiny", "config": config})
        made.save_pretrained(tmp_path / name)
        assert_same(engine(tmp_path / name).parameters, made.parameters)
        again, built = from_pretrained(tmp_path / name).config, build(name, "tiny", config).config
        head = {"head_dim": 16} if name == "llama" else {}
        assert again == dataclasses.replace(built, **head)


def test_a_model_of_ones_own_needs_a_mapping_table_alone(tmp_path):
    def init(key):
        return {"first": np.zeros((4, 6), np.float32), "second": np.zeros((2, 6, 3), np.float32)}

    def loss(model, batch):
        return model(batch["x"]).mean()

    table = MappingTable(
        [
            TensorRule("in.weight", "first", "out in -> in out"),
            TensorRule("out.{i}.weight", "second", "out in -> i in out"),
        ]
    )
    rng = np.random.default_rng(0)
    tensors = {"in.weight": rng.normal(size=(6, 4)).astype(np.float32)}
    tensors |= {f"out.{i}.weight": rng.normal(size=(3, 6)).astype(np.float32) for i in range(2)}
    source = folders.folder(tmp_path / "in", {"model_type": "mine"}, tensors)
    model = pretrained((init, lambda params, x: x @ params["first"]), source, table, loss)
    made = engine(model, zero_optimization={"stage": 3})
    np.testing.assert_array_equal(made.parameters["first"], tensors["in.weight"].T)
    np.testing.assert_array_equal(made.parameters["second"][1], tensors["out.1.weight"].T)
    made.save_pretrained(tmp_path / "out")
    assert_same(read(tmp_path / "out"), tensors)
    made.save_pretrained(tmp_path / "other", form=HFForm(table))
    assert_same(read(tmp_path / "other"), tensors)


def test_a_models_other_state_is_initialized(tmp_path):
    tensors = folders.gpt2_tensors()
    source = folders.folder(tmp_path, folders.GPT2, tensors)
    made = engine({"pretrained": str(source), "config": {"dropout": 0.1}})
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 40,
        "max_position_embeddings": 64, "dropout": 0.1,
    }  # fmt: skip
    fresh = engine({"family": "gpt2", "config": sizes})

    def data(x):
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    variables = {path: data(x) for path, x in fresh.state.variables.items()}
    assert_same({path: data(x) for path, x in made.state.variables.items()}, variables)
    before = {path: np.asarray(x) for path, x in made.parameters.items()}
    made.train_batch({"tokens": np.ones((8, 9), np.int32)})
    assert any((np.asarray(x) != before[path]).any() for path, x in made.parameters.items())
    made.reset()
    assert_same(made.parameters, before)


def test_a_truncated_folder_is_refused_by_initialize(tmp_path):
    file = folders.folder(tmp_path, folders.LLAMA, folders.llama_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(jaxspeed.PretrainedError, match="truncated"):
        engine(tmp_path)


def test_a_process_maps_only_the_pages_of_its_shards(tmp_path):
    code = f"""
import re
import numpy as np
from jaxspeed.interop.safetensors import TensorFile
file = TensorFile.open(__import__("pathlib").Path({str(tmp_path / "big.safetensors")!r}))
part = np.array(file.array("b")[1000:2000])
resident = re.search(r"big.safetensors.*?Rss:\\s+(\\d+) kB", open("/proc/self/smaps").read(), re.S)
print(resident[1])
"""
    rows = np.zeros((8000, 1024), np.float32)  # 4 KB each
    folders.write(tmp_path / "big.safetensors", {"a": rows, "b": rows})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 4000 <= int(done.stdout) <= 4000 + 2 * 2048, "of 64,000 KB, and pages of up to 2 MB"
