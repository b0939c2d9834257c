"""Folders read into a quantized base, and folders that bitsandbytes has quantized."""

import functools
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxspeed
from jaxspeed.errors import PretrainedError
from jaxspeed.interop.hf_folder import PretrainedFolder
from tests.interop import folders
from tests.quantization import numpy_codes
from tests.support.covering import covering

EMBED, MLP, LAYERS, HEADS, KV_HEADS, VOCAB = 128, 192, 2, 4, 2, 24
DIM = EMBED // HEADS
LLAMA = folders.LLAMA | {
    "hidden_size": EMBED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
}
LINEAR = {
    "self_attn.q_proj": ("attn/q_proj", (EMBED, EMBED)),
    "self_attn.k_proj": ("attn/k_proj", (KV_HEADS * DIM, EMBED)),
    "self_attn.v_proj": ("attn/v_proj", (KV_HEADS * DIM, EMBED)),
    "self_attn.o_proj": ("attn/o_proj", (EMBED, EMBED)),
    "mlp.gate_proj": ("mlp/gate", (MLP, EMBED)),
    "mlp.up_proj": ("mlp/up", (MLP, EMBED)),
    "mlp.down_proj": ("mlp/down", (EMBED, MLP)),
}


@functools.cache
def tensors(dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
    shapes["lm_head.weight"] = (VOCAB, EMBED)
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{name}.weight"] = (EMBED,)
        for name, (_, shape) in LINEAR.items():
            shapes[f"{block}.{name}.weight"] = shape
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def linear(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x for name, x in found.items() if name.split(".weight")[0].endswith("_proj")}


def engine(folder: Path, quantize: dict | None, mesh: dict, devices=None, **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "trainable": ["norm", "*_norm"],
        "model": {"pretrained": str(folder), **({"quantize": quantize} if quantize else {})},
        "mesh": mesh,
        **more,
    }
    return jaxspeed.initialize(None, None, config, devices=devices)


def codes_of(made, layer: int, name: str) -> dict[str, np.ndarray]:
    """The arrays of a weight as matrices [out, in]."""
    stored = made.state.params[f"blocks/{LINEAR[name][0]}/kernel"]
    rows = LINEAR[name][1][0]
    arrays = {part: np.asarray(x)[layer] for part, x in stored.items()}
    for part in ("codes", "scales"):
        arrays[part] = arrays[part].reshape(-1, rows).T
    return arrays


MESHES = [{"data": 8}, {"data": 4, "tensor": 2}]


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", covering(MESHES, MESHES[1:]))
def test_a_folder_is_read_into_codes(tmp_path, mesh):
    given = tensors()
    made = engine(folders.folder(tmp_path, LLAMA, given), {"weights": "nf4"}, mesh)
    for layer in range(LAYERS):
        for name in LINEAR:
            weight = given[f"model.layers.{layer}.{name}.weight"]
            found = codes_of(made, layer, name)
            for part, x in numpy_codes.four_bit(weight, "nf4", True).items():
                own = found[part][tuple(map(slice, x.shape))]
                np.testing.assert_array_equal(own, x, f"{name} {part}")
    assert not isinstance(made.state.params["blocks/attn_norm/scale"], dict)
    np.testing.assert_array_equal(
        np.asarray(made.parameters["head/table"]), given["lm_head.weight"]
    )
    made.train_batch({"tokens": np.ones((mesh["data"], 9), np.int32)})


def test_layers_are_read_one_by_one(tmp_path, monkeypatch):
    """No array of a stack in full precision is made, on a device or the host."""
    from jaxspeed.interop.pretrained import FolderWeights

    read, sizes = FolderWeights.read, []

    def seen(self, path, index, dtype):
        block = read(self, path, index, dtype)
        stack = f"{LAYERS} layers" if path.startswith("blocks") and len(index) > 2 else ""
        sizes.append((path, block.shape[0], stack))
        arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
        for shape in ((LAYERS, EMBED, MLP), (LAYERS, MLP, EMBED)):
            assert not [x for x in arrays if x.shape == shape and x.dtype == np.float32]
        return block

    monkeypatch.setattr(FolderWeights, "read", seen)
    engine(folders.folder(tmp_path, LLAMA, tensors()), {"weights": "int8"}, {"data": 8})
    assert all(rows == 1 for path, rows, stack in sizes if stack), sizes


FORMS = [("nf4", True), ("fp4", False), ("int8", False)]


@pytest.mark.default_cases("nf4-True", "fp4-False")
@pytest.mark.parametrize(("values", "double"), FORMS)
def test_a_folder_of_bitsandbytes_has_its_values_and_codes(references, tmp_path, values, double):
    """Values as theirs; the same codes in a base of the same form, and other values in another."""
    given = tensors(ml_dtypes.bfloat16 if values == "nf4" else np.float32)
    quantized = references.call("bnb.saved", weights=linear(given), values=values, double=double)
    theirs = {n.removeprefix("value of "): x for n, x in quantized.items() if "value of" in n}
    saved = {n: x for n, x in quantized.items() if "value of" not in n}
    rest = {n: x for n, x in given.items() if n not in theirs}
    config = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}
    folder = folders.folder(tmp_path, config, rest | saved)
    opened = PretrainedFolder(folder)
    for name, x in theirs.items():
        found = opened.array(name)
        assert found.dtype == x.dtype and opened.tensors[name].shape == x.shape
        np.testing.assert_array_equal(found, x, name)
    quantize = {"weights": values} | ({} if values == "int8" else {"double": double})
    made = engine(folder, quantize, {"data": 4, "tensor": 2}, bf16={"enabled": True})
    for layer in range(LAYERS):
        for name, (_, (rows, size)) in LINEAR.items():
            full = f"model.layers.{layer}.{name}.weight"
            found = codes_of(made, layer, name)
            codes = found["codes"][:, : size if values == "int8" else size // 2]
            np.testing.assert_array_equal(codes, saved[full].reshape(rows, -1), name)
            if double:
                groups = saved[f"{full}.nested_absmax"]
                np.testing.assert_array_equal(found["groups"][: len(groups)], groups)
                scales = saved[f"{full}.absmax"].reshape(rows, -1)
                np.testing.assert_array_equal(found["scales"][:, : scales.shape[1]], scales)


def test_a_damaged_state_is_one_error(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    for state in (
        b"{}",
        b"\xff",
        json.dumps({"shape": [3], "dtype": "x", "blocksize": 64}).encode(),
    ):
        saved = {
            name: np.zeros((EMBED * MLP // 2, 1), np.uint8),
            f"{name}.absmax": np.zeros(EMBED * MLP // 64, np.float32),
            f"{name}.quant_map": np.zeros(16, np.float32),
            f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8),
        }
        config = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}
        folder = folders.folder(tmp_path, config, saved)
        with pytest.raises(PretrainedError, match=r"bitsandbytes__nf4 is not a state"):
            PretrainedFolder(folder).tensors.keys()


def test_what_is_exported_is_dequantized(tmp_path):
    given = tensors()
    source = folders.folder(tmp_path / "in", LLAMA, given)
    made = engine(source, {"weights": "nf4"}, {"data": 8})
    made.save_pretrained(tmp_path / "out")
    out = PretrainedFolder(tmp_path / "out")
    assert set(out.tensors) == set(given)
    for name, x in given.items():
        found = np.array(out.array(name))
        if name in linear(given):
            codes = numpy_codes.four_bit(x, "nf4", True)
            x = numpy_codes.dequantized(codes, "nf4", x.shape[1])
            np.testing.assert_allclose(found, x, rtol=0, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found, x, name)
