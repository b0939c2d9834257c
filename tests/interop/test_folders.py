"""Folders written with NumPy are read into shards and written again, without `transformers`."""

import dataclasses
import fnmatch
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jaxspeed.models import build, from_pretrained

import jaxspeed
from jaxspeed.data import BPETokenizer, ByteTokenizer
from jaxspeed.interop import HFForm, MappingTable, TensorRule, pretrained
from jaxspeed.interop.hf_folder import PretrainedFolder
from jaxspeed.interop.pretrained import data_section, warn_of_other_tokenizer
from jaxspeed.interop.safetensors import TensorFile
from tests.interop import folders

SHARDED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "mesh": {"data": 4, "tensor": 2},
}


def engine(model, **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
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


@pytest.mark.default_cases("3")
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


def test_fp8_with_block_scales_is_dequantized(tmp_path):
    """Blocks of 8 x 6, which divide neither dim; an export is not quantized."""
    tensors, rows, columns = folders.llama_tensors(), 8, 6
    stored, expected, rng = {}, {}, np.random.default_rng(1)
    for name, x in tensors.items():
        if "_proj" not in name:
            stored[name] = expected[name] = x
            continue
        low = x.astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.1, 2, (-(-x.shape[0] // rows), -(-x.shape[1] // columns)))
        stored |= {name: low, f"{name}_scale_inv": scales.astype(np.float32)}
        expected[name] = low.astype(np.float32)
        for i, j in np.ndindex(x.shape):
            expected[name][i, j] *= stored[f"{name}_scale_inv"][i // rows, j // columns]
    quantization = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    config = folders.LLAMA | {"quantization_config": quantization}
    made = engine(folders.folder(tmp_path / "in", config, stored, files=2), **SHARDED)
    assert_same(made.parameters, folders.llama_parameters(expected))
    made.save_pretrained(tmp_path / "out")
    assert_same(read(tmp_path / "out"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("scale", [np.full((), 3, np.float32), np.full((1, 1), 3, np.float32)])
def test_one_fp8_scale_is_of_the_whole_tensor(tmp_path, scale):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    low = {"w": x.astype(ml_dtypes.float8_e4m3fn), "w_scale_inv": scale}
    folders.write(tmp_path / "model.safetensors", low)
    np.testing.assert_array_equal(PretrainedFolder(tmp_path).array("w"), 3 * x)


def test_the_tokenizer_of_a_folder_is_the_datas(tmp_path):
    source = folders.folder(tmp_path, folders.LLAMA, {})
    config = jaxspeed.Config(train_batch_size=8, model={"pretrained": str(source)})
    assert data_section(config).tokenizer == "bytes"
    (source / "vocab.json").write_text("{}")
    with pytest.raises(jaxspeed.PretrainedError, match=r"vocab.json but no tokenizer.json"):
        data_section(config)
    (source / "tokenizer.model").write_text("")
    assert data_section(config).tokenizer == str(source)


def test_a_tokenizer_other_than_the_pretrained_models_is_warned_of_and_a_new_one_refused(
    tmp_path, caplog
):
    source = folders.folder(tmp_path, folders.LLAMA, {})
    config = {"train_batch_size": 8, "model": {"pretrained": str(source)}}

    def warning(used, **data):
        caplog.clear()
        config_of_data = jaxspeed.Config(**config, data=data)
        warn_of_other_tokenizer(config_of_data, used, 512)
        return caplog.text

    read_as_bytes = ByteTokenizer()
    assert "has no tokenizer, so that text is read as bytes" in warning(read_as_bytes)
    assert not warning(read_as_bytes, tokenizer="bytes")  # it is meant
    of_folder = BPETokenizer.train(["some words, some more words"] * 9, 270)
    (source / "tokenizer.json").write_bytes(of_folder.to_bytes())
    assert not warning(of_folder)
    assert "data.tokenizer: bytes is not that of model.pretrained" in warning(read_as_bytes)
    assert "is not that of model.pretrained" in warning(BPETokenizer.train(["a b c"], 262))
    with pytest.raises(
        jaxspeed.ConfigError, match=r'tokenizer: found "bpe", with model\.pretrained'
    ):
        jaxspeed.Config(**config, data={"tokenizer": "bpe"})


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


@pytest.mark.sampled
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


@pytest.mark.sampled
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


WANTED = {
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.model",
    "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja",
}  # fmt: skip
OTHERS = {
    "pytorch_model-00001-of-00002.bin", "modeling_llama.py", "tf_model.h5", "model.gguf",
    "README.md", "original/params.json", "original/consolidated.00.pth", "onnx/model.onnx",
    "consolidated.safetensors", "training_args.bin", "1_Pooling/config.json",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """A stub of huggingface_hub, whose `snapshot_download` a test sets."""
    module = types.ModuleType("huggingface_hub")
    module.__spec__ = importlib.machinery.ModuleSpec("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_of_a_model_of_the_hub_only_what_is_read_is_downloaded(tmp_path, hub):
    source, asked = folders.folder(tmp_path, folders.GPT2, folders.gpt2_tensors()), []

    def download(name, *, allow_patterns, ignore_patterns):
        def matches(file, patterns):
            return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

        chosen = {f for f in WANTED | OTHERS if matches(f, allow_patterns)}
        asked.append((name, {f for f in chosen if not matches(f, ignore_patterns)}))
        return str(source)

    hub.snapshot_download = download
    made = engine({"pretrained": "org/a-model.v1"})
    table = folders.gpt2_tensors()["transformer.wpe.weight"]
    np.testing.assert_array_equal(made.parameters["positions/table"], table)
    assert asked == [("org/a-model.v1", WANTED)] * len(asked) and asked


def test_a_hub_that_cannot_be_reached_is_one_error(hub, monkeypatch):
    def download(name, **patterns):
        raise ConnectionError(f"no route to the host of {name}\nand what was tried")

    hub.snapshot_download = download
    with pytest.raises(jaxspeed.PretrainedError) as found:
        engine({"pretrained": "org/name"})
    assert str(found.value) == (
        "org/name: no such folder, and the hub has no such model or cannot be reached: no route to "
        "the host of org/name"
    )
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(jaxspeed.PretrainedError, match="needs the package huggingface_hub"):
        from_pretrained("org/name")


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
