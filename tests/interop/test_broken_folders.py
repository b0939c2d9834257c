"""Each way in which a folder is broken is one clear error, before any array exists."""

import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from jaxspeed.models import from_pretrained

import jaxspeed
from jaxspeed.user_models import adapt_model
from tests.interop import folders

pytestmark = pytest.mark.fast
INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000
Q = "model.layers.1.self_attn.q_proj.weight"


def sound(path, files=1, without=(), more=None, **config):
    """A folder of a small Llama; fields of `without` are left out of its config."""
    values = {k: v for k, v in (folders.LLAMA | config).items() if k not in without}
    tensors = folders.llama_tensors() | (more or {})
    return folders.folder(path, values, {n: x for n, x in tensors.items() if x is not None}, files)


def with_config(**fields):
    return lambda path: sound(path, **fields)


def with_file(name, content):
    def make(path):
        sound(path)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def truncated(path):
    file = sound(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def longer(path):
    with (sound(path) / "model.safetensors").open("ab") as file:
        file.write(b"1234")


def overlapping(path):
    file = sound(path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"data_offsets": [0, ', b'"data_offsets": [4, ', 1))


def with_header(entry, old, new):
    """The header with the first `old` after `entry` replaced."""

    def make(path):
        file = sound(path) / "model.safetensors"
        before, found, after = file.read_bytes().partition(entry.encode())
        assert found
        at = found + after
        file.write_bytes(before + at.replace(old.encode(), new.encode(), 1))

    return make


def four_bits(file):
    header = json.dumps({"w": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def a_shard_absent(path):
    (sound(path, files=3) / "model-00002-of-00003.safetensors").unlink()


def an_index_of_other_tensors(path):
    index = sound(path, files=3) / INDEX
    values = json.loads(index.read_text())
    values["weight_map"]["model.more"] = values["weight_map"].pop(Q)
    index.write_text(json.dumps(values))


def an_index_that_leaves_its_folder(path):
    (sound(path) / INDEX).write_text(json.dumps({"weight_map": {Q: "../model.safetensors"}}))


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a folder was run')",)


def pickled(path):
    (sound(path) / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


def twice(path):
    sound(path)
    folders.write(path / "more.safetensors", {Q: np.zeros((2, 2), np.float32)})


def large_tokenizer(path):
    vocab = {f"t{i}": i for i in range(folders.VOCAB + 1)}
    with_file("tokenizer.json", json.dumps({"model": {"vocab": vocab}}))(path)


BROKEN = {
    "truncated": (truncated, "model.safetensors: has", "it is truncated"),
    "longer": (longer, "model.safetensors: has", "it is damaged"),
    "overlapping": (overlapping, "its header is damaged", "invalid offset for tensor"),
    "another format": (
        with_file("model.safetensors", "no such format here"), "has 19 bytes", "truncated, or no",
    ),
    "empty file": (with_file("model.safetensors", ""), "has 0 bytes"),
    "damaged header": (
        with_file("model.safetensors", (9).to_bytes(8, "little") + b"{not json"),
        "its header is damaged",
    ),
    "another shape in the header": (
        with_header(f'"{Q}": {{"dtype": "F32", "shape": [16, 16]', "[16, 16]", "[16, 18]"),
        "its header is damaged", "invalid shape, data type, or offset",
    ),
    "unknown dtype": (with_header(Q, "F32", "F99"), "its header is damaged", "F99"),
    "unsupported dtype": (
        lambda path: four_bits(sound(path) / "more.safetensors"),
        "more.safetensors: w has dtype F4, which is not supported",
    ),
    "renamed": (
        lambda path: sound(path, more={Q: None, f"{Q}s": np.zeros((16, 16), np.float32)}),
        f"{Q} is missing (nearest: {Q}s)", f"{Q}s [16, 16] is left over",
    ),
    "surplus": (
        lambda path: sound(path, more={"model.extra.bias": np.zeros(3, np.float32)}),
        "model.extra.bias [3] is left over",
    ),
    "missing": (lambda path: sound(path, more={Q: None}), f"{Q} is missing"),
    "mis-shaped": (
        lambda path: sound(path, more={Q: np.zeros((16, 8), np.float32)}),
        f"{Q} has shape [16, 8], expected [16, 16]",
    ),
    "unused head": (with_config(num_hidden_layers=2), "model.layers.2", "is left over"),
    "a shard absent": (a_shard_absent, "absent", "model-00002-of-00003.safetensors"),
    "an index of other tensors": (
        an_index_of_other_tensors, f"{Q} is in", "but not in the index", "model.more is not in",
    ),
    "an index that leaves its folder": (an_index_that_leaves_its_folder, "not in its folder"),
    "an index without a map": (with_file(INDEX, "{}"), "no weight_map"),
    "a tensor in two files": (twice, f"{Q} is in", INDEX),
    "pickled": (pickled, "pytorch_model.bin", "a pickle: reading it could run any code"),
    "no weights": (
        lambda path: (sound(path) / "model.safetensors").unlink(), "has no *.safetensors file",
    ),
    "no config": (lambda path: (sound(path) / "config.json").unlink(), "config.json: missing"),
    "config is not JSON": (with_file("config.json", "{"), "config.json: cannot be read"),
    "no model type": (lambda path: sound(path, without=["model_type"]), "has no model_type"),
    "unknown family": (
        with_config(model_type="lama"), "'lama' is of no known family: did you mean 'llama'?",
        "jaxspeed.interop.pretrained",
    ),
    "no text_config beside images": (with_config(model_type="gemma3"), "has no text_config"),
    "missing field": (
        lambda path: sound(path, without=["hidden_size", "vocab_size"]),
        "hidden_size is missing: an integer", "vocab_size is missing",
    ),
    "wrong type of field": (
        with_config(num_attention_heads="four"), "num_attention_heads is 'four'",
    ),
    "negative field": (with_config(vocab_size=-1), "vocab_size is -1, which is not positive"),
    "heads that do not divide": (
        with_config(num_key_value_heads=3), "num_key_value_heads 3 does not divide",
    ),
    "unsupported activation": (
        with_config(hidden_act="relu"), "hidden_act is 'relu'; only 'silu' is supported",
    ),
    "unsupported scaling": (
        with_config(rope_scaling={"rope_type": "cubic", "factor": 2.0}),
        "rope_type is 'cubic'; known are llama3, linear, yarn, dynamic, longrope",
    ),
    "scaling without its fields": (
        with_config(rope_scaling={"type": "linear"}), "linear needs factor",
    ),
    "scaling with other fields": (
        with_config(rope_scaling={"type": "linear", "factor": 2.0, "fctor": 1}), "'fctor' is none",
    ),
    "scaling of other heads": (
        with_config(rope_scaling={
            "type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0],
        }),
        "short_factor has 1 factors; the heads have 2 frequencies",
    ),
    "a tokenizer larger than the vocabulary": (
        large_tokenizer, "has ids up to 40, but vocab_size in config.json is 40",
    ),
    "a quantization that is not read": (
        with_config(quantization_config={"quant_method": "gptq"}),
        "quant_method is 'gptq'; fp8, mxfp4, bitsandbytes are dequantized",
    ),
    "scales of other blocks": (
        lambda path: sound(
            path,
            more={
                Q: np.zeros((16, 16), ml_dtypes.float8_e4m3fn),
                f"{Q}_scale_inv": np.ones((2, 3), np.float32),
            },
            quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]},
        ),
        f"{Q}_scale_inv has shape [2, 3]", "needs [2, 2]",
    ),
    "a damaged tokenizer.model": (
        with_file("tokenizer.model", b"\x0a\xff\xff"), "is not a SentencePiece model",
    ),
    "a damaged tokenizer": (with_file("tokenizer.json", "[]"), "is not a tokenizer.json"),
    "a tokenizer with a text as id": (
        with_file("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'), "an id is no integer",
    ),
    "deep config": (with_file("config.json", DEEP), "config.json: cannot be read"),
    "deep index": (with_file(INDEX, DEEP), f"{INDEX}: cannot be read"),
    "deep header": (
        with_file("model.safetensors", len(DEEP).to_bytes(8, "little") + DEEP.encode()),
        "its header is damaged",
    ),
    "deep tokenizer": (with_file("tokenizer.json", DEEP), "is not a tokenizer.json"),
    "an index of other values": (
        with_file(INDEX, '{"weight_map": {"a": "b", "c": 5}}'), "files that are absent", "  5",
    ),
    "a billion layers": (
        with_config(num_hidden_layers=10**9),
        "the model has 1,000,000,000 of it, the folder 30 tensors",
    ),
    "more layers than there are numbers": (
        with_config(num_hidden_layers=10**30), "num_hidden_layers is 1000", "no size is over",
    ),
    "zero heads": (with_config(num_attention_heads=0), "num_attention_heads is 0"),
    "integers": (
        lambda path: sound(path, more={Q: np.zeros((16, 16), np.int32)}), f"{Q} has dtype int32",
    ),
    "booleans": (
        lambda path: sound(path, more={Q: np.zeros((16, 16), bool)}), f"{Q} has dtype bool",
    ),
    "a quantization that is a number": (
        with_config(quantization_config=5), "quantization_config is 5, not a mapping",
    ),
    "blocks that are no list": (
        lambda path: sound(
            path,
            more={
                Q: np.zeros((16, 16), ml_dtypes.float8_e4m3fn),
                f"{Q}_scale_inv": np.ones((2, 2), np.float32),
            },
            quantization_config={"quant_method": "fp8", "weight_block_size": [0, "x"]},
        ),
        "weight_block_size is [0, 'x'], not a list of positive integers",
    ),
    "a negative epsilon": (
        with_config(rms_norm_eps=-1.0), "rms_norm_eps is -1.0, which is negative",
    ),
    "a number larger than fp64": (with_config(rms_norm_eps=10**400), "which is not a number"),
    "a negative base of rotations": (with_config(rope_theta=-1), "rope_theta is -1"),
    "a zero context": (
        with_config(rope_scaling={"type": "yarn", "original_max_position_embeddings": 0}), "zero",
    ),
    "a zero factor": (
        with_config(rope_scaling={"type": "linear", "factor": 0.0}), "factor 0.0: not positive",
    ),
    "a window of text": (
        with_config(model_type="mistral", sliding_window="x"), "sliding_window is 'x'",
    ),
}  # fmt: skip


def read(path):
    model = from_pretrained(path)
    leaves = adapt_model(model, model.loss).leaves
    model.weights.check({leaf.path: leaf.shape for leaf in leaves})


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_clear_error(tmp_path, name):
    make, *words = BROKEN[name]
    make(tmp_path)
    with pytest.raises(jaxspeed.PretrainedError) as found:
        read(tmp_path)
    for word in words:
        assert word in str(found.value), found.value
    assert str(tmp_path) in str(found.value)


def test_the_same_folders_are_read_when_they_are_not_broken(tmp_path):
    for files in (1, 3):
        read(sound(tmp_path / str(files), files))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(jaxspeed.PretrainedError, match=path.name):
            from_pretrained(path)
