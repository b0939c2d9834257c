"""Adapters' files without PEFT: layouts, merging, other forms, and each way to be wrong."""

import json
import pickle
import re

import numpy as np
import pytest
from jaxspeed.models import build, hf_form
from safetensors.numpy import load_file, save_file

import jaxspeed
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.checkpoint.header import AdapterRecord
from jaxspeed.cli.main import main
from jaxspeed.config.lora_section import Lora
from jaxspeed.errors import PretrainedError
from jaxspeed.interop import MappingTable, TensorRule
from jaxspeed.interop.export_values import MergedValues
from jaxspeed.interop.peft import adapted_weights, adapter_values, lora_section, read_adapter
from jaxspeed.interop.peft_config import AdapterForm
from jaxspeed.interop.peft_export import write_adapter
from jaxspeed.jaxpr.weight_uses import WeightDims
from tests.interop import peft_values
from tests.interop.peft_values import ArrayValues

LAYERS, EMBED, HEADS, DIM, OUT, EXPERTS, VOCAB = 2, 6, 3, 2, 10, 4, 9
# A weight of each kind: rules, shapes, (stack, inputs, outputs).
TABLE = MappingTable([
    TensorRule("m.tok.weight", "tok", kind="embedding"),
    TensorRule(
        "m.h.{layer}.q.weight", "q/kernel", "(heads dim) embed -> layer embed heads dim"
    ),
    TensorRule(
        "m.h.{layer}.qkv.weight", ("a/kernel", "b/kernel", "c/kernel"),
        "embed (part out) -> layer embed out", kind="conv1d",
    ),
    TensorRule(
        "m.conv.weight", "conv/kernel", "out channel row column -> row column channel out"
    ),
    TensorRule("m.h.{layer}.experts.up", "up", "expert out in -> layer expert in out"),
    TensorRule(
        "m.h.{layer}.experts.down", "down", "expert in out -> layer expert in out", kind="conv1d",
    ),
    TensorRule("m.head.weight", "head"),
    TensorRule("m.head.bias", "head_bias"),
], prefix="m.")  # fmt: skip
SHAPES = {
    "tok": (VOCAB, EMBED),
    "q/kernel": (LAYERS, EMBED, HEADS, DIM),
    "a/kernel": (LAYERS, EMBED, OUT),
    "b/kernel": (LAYERS, EMBED, 4),
    "c/kernel": (LAYERS, EMBED, 4),
    "conv/kernel": (2, 3, 4, 5),
    "up": (LAYERS, EXPERTS, EMBED, OUT),
    "down": (LAYERS, EXPERTS, OUT, EMBED),
    "head": (VOCAB, EMBED),
    "head_bias": (VOCAB,),
}
DIMS = {
    "tok": WeightDims((), (0,), (1,), "lookup"),
    "q/kernel": WeightDims((0,), (1,), (2, 3), "product"),
    **{f"{n}/kernel": WeightDims((0,), (1,), (2,), "product") for n in "abc"},
    "conv/kernel": WeightDims((), (0, 1, 2), (3,), "convolution"),
    "up": WeightDims((0, 1), (2,), (3,), "product"),
    "down": WeightDims((0, 1), (2,), (3,), "product"),
}


def adapters(paths, ranks=3, dora=False, alpha=6.0):
    made = {}
    for path in paths:
        of = ranks if isinstance(ranks, tuple) else (ranks,)
        scales = tuple(alpha / max(1, rank) for rank in of)
        made[path] = Adapter(path, SHAPES[path], DIMS[path], of, scales, dora=dora)
    return made


def arrays(of, seed=0):
    """All parameters, and the adapters' leaves, whose padding is zero."""
    rng = np.random.default_rng(seed)
    shapes = SHAPES | {leaf: shape for a in of.values() for leaf, shape in a.shapes.items()}
    made = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    for adapter in of.values():
        for at, rank in np.ndenumerate(adapter.per_layer(adapter.ranks)):
            made[adapter.leaf("A")][at][..., rank:] = 0
            made[adapter.leaf("B")][at][rank:] = 0
    return made


def written(folder, of, table=TABLE, seed=0, trained=(), **section):
    """(arrays, tensors, config) of adapters that are written."""
    values = arrays(of, seed)
    own = Lora(**{"r": 3, "lora_alpha": 6, **section}).model_dump()
    write_adapter(ArrayValues(values), folder, AdapterForm(AdapterRecord(own, of, trained), table))
    tensors = load_file(folder / "adapter_model.safetensors")
    return values, tensors, json.loads((folder / "adapter_config.json").read_text())


def leaves_of(values):
    return {path: x.shape for path, x in values.items()}


@pytest.mark.fast
def test_what_peft_does_not_load_is_not_written(tmp_path):
    """Of experts, which all-linear adapts too."""
    with pytest.raises(PretrainedError, match=r"^up, down: a parameter .* PEFT has no DoRA"):
        written(tmp_path / "dora", adapters(["up", "down"], dora=True), use_dora=True)
    assert not (tmp_path / "dora").exists()


@pytest.mark.fast
def test_each_kind_has_peft_s_layout(tmp_path):
    values, tensors, config = written(tmp_path, adapters(DIMS, ranks=3), trained=["head_bias"],
                                      modules_to_save=["head"], lora_dropout=0.1)  # fmt: skip
    begin, expected = "base_model.model.m.", {}

    def factors(path):
        return values[f"lora/{path}/A"], values[f"lora/{path}/B"]

    a, b = factors("tok")
    expected["tok.lora_embedding_A"], expected["tok.lora_embedding_B"] = a.T, b.T
    a, b = factors("conv/kernel")
    expected["conv.lora_A.weight"] = np.einsum("yxcr->rcyx", a)
    expected["conv.lora_B.weight"] = b.T[:, :, None, None]
    for i in range(LAYERS):
        a, b = factors("q/kernel")
        expected[f"h.{i}.q.lora_A.weight"] = a[i].T
        expected[f"h.{i}.q.lora_B.weight"] = b[i].reshape(3, -1).T
        parts = [factors(f"{n}/kernel") for n in "abc"]
        expected[f"h.{i}.qkv.lora_A.weight"] = np.concatenate([a[i].T for a, _ in parts])
        blocks = np.zeros((18, 9), np.float32)
        blocks[:10, :3], blocks[10:14, 3:6], blocks[14:, 6:] = (b[i].T for _, b in parts)
        expected[f"h.{i}.qkv.lora_B.weight"] = blocks
        for name, inner in (("up", ".base_layer"), ("down", "")):
            a, b = factors(name)  # [expert, in, r], [expert, r, out]
            at = f"h.{i}.experts{inner}"
            expected[f"{at}.lora_A.weight"] = np.concatenate([a[i, e].T for e in range(EXPERTS)])
            # PEFT reads it as [out, r, experts].
            expected[f"{at}.lora_B.weight"] = np.einsum("ero->ore", b[i]).reshape(b.shape[3], -1)
    expected |= {"head.weight": values["head"], "head.bias": values["head_bias"]}
    assert tensors.keys() == {begin + name for name in expected}
    for name, x in expected.items():
        np.testing.assert_array_equal(tensors[begin + name], x, err_msg=name)
    assert (config["r"], config["rank_pattern"]) == (3, {"qkv": 9})
    assert (config["lora_alpha"], config["alpha_pattern"]) == (6, {"qkv": 18})
    assert config["target_modules"] == ["conv", "q", "qkv", "tok"]
    assert config["target_parameters"] == ["down", "up"]
    assert config["modules_to_save"] == ["head"] and config["fan_in_fan_out"]
    assert config["lora_dropout"] == 0
    found = adapter_values(read_adapter(tmp_path), leaves_of(values), TABLE)
    assert found.keys() == {p for p in values if p.startswith("lora/")} | {"head", "head_bias"}
    for path, x in found.items():
        np.testing.assert_array_equal(x, values[path], err_msg=path)


@pytest.mark.fast
def test_dora_s_magnitudes_are_of_outputs(tmp_path):
    of = adapters([p for p in DIMS if p not in ("up", "down", "b/kernel")], dora=True)
    values, tensors, _ = written(tmp_path, of, use_dora=True)
    begin = "base_model.model.m."

    def own(path):
        return values[f"lora/{path}/magnitude"]

    np.testing.assert_array_equal(tensors[f"{begin}tok.lora_magnitude_vector"], own("tok"))
    conv = tensors[f"{begin}conv.lora_magnitude_vector"]
    np.testing.assert_array_equal(conv, own("conv/kernel").reshape(1, 5, 1, 1))
    for i in range(LAYERS):
        # What is not adapted keeps its norm.
        norms = np.sqrt(np.square(values["b/kernel"][i]).sum(0))
        joined = np.concatenate([own("a/kernel")[i], norms, own("c/kernel")[i]])
        fused = tensors[f"{begin}h.{i}.qkv.lora_magnitude_vector"]
        np.testing.assert_allclose(fused, joined, rtol=1e-6)
        q = tensors[f"{begin}h.{i}.q.lora_magnitude_vector"]
        np.testing.assert_array_equal(q, own("q/kernel")[i].ravel())


@pytest.mark.fast
def test_padded_ranks_and_layers_without_one_are_in_no_file(tmp_path):
    values, tensors, config = written(tmp_path, adapters(["q/kernel", "a/kernel"], (0, 2)))
    begin = "base_model.model.m.h.1."
    assert {name: x.shape for name, x in tensors.items()} == {
        f"{begin}q.lora_A.weight": (2, 6), f"{begin}q.lora_B.weight": (6, 2),
        f"{begin}qkv.lora_A.weight": (2, 6), f"{begin}qkv.lora_B.weight": (18, 2),
    }  # fmt: skip
    assert config["target_modules"] == ["1.q", "1.qkv"] and config["r"] == 2
    found = adapter_values(read_adapter(tmp_path), leaves_of(values), TABLE)
    for path, x in found.items():
        np.testing.assert_array_equal(x, values[path], err_msg=path)
    weights = adapted_weights(read_adapter(tmp_path), SHAPES, TABLE)
    assert {path: w.ranks.tolist() for path, w in weights.items()} == {
        "q/kernel": [0, 2], "a/kernel": [0, 2],
    }  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("dora", [False, True])
def test_merged_is_the_formula(dora):
    paths = [p for p in DIMS if not (dora and p in ("up", "down"))]
    of = adapters(paths, dora=dora) | adapters(["q/kernel", "a/kernel"], (3, 0), dora=dora)
    values = arrays(of)
    merged = MergedValues(ArrayValues(values), of)
    assert merged.leaves == {p: (SHAPES[p], "float32") for p in SHAPES}
    for path in SHAPES:
        found = np.full(SHAPES[path], np.nan, np.float32)
        for index, block in merged.blocks(path):
            found[index] = block
        expected = values[path]
        if path in of:
            parts = {n: values.get(f"lora/{path}/{n}") for n in ("A", "B", "magnitude")}
            expected = peft_values.merged(expected, parts, of[path])
            assert np.abs(expected - values[path]).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.fast
def test_a_model_without_a_table_has_its_paths_as_keys(tmp_path):
    of = adapters(["q/kernel", "conv/kernel", "up"]) | adapters(["a/kernel"], (1, 3))
    values, tensors, _ = written(
        tmp_path, of, table=None, trained=["head"], target_modules=["q", "conv", "up", "a"],
        rank_pattern={"a": 3},
    )  # fmt: skip
    begin = "base_model.model."
    assert tensors[f"{begin}a.kernel.0.lora_A.weight"].shape == (1, EMBED)
    np.testing.assert_array_equal(
        tensors[f"{begin}up.1.2.lora_B.weight"], values["lora/up/B"][1, 2].T
    )
    np.testing.assert_array_equal(
        tensors[f"{begin}q.kernel.1.lora_B.weight"],
        values["lora/q/kernel/B"][1].reshape(3, -1).T,
    )
    np.testing.assert_array_equal(tensors[f"{begin}head"], values["head"])
    adapter = read_adapter(tmp_path)
    for path, x in adapter_values(adapter, leaves_of(values), None).items():
        np.testing.assert_array_equal(x, values[path], err_msg=path)
    weights = adapted_weights(adapter, SHAPES, None)
    assert weights["a/kernel"].ranks.tolist() == [1, 3]
    assert weights["up"].ranks.tolist() == [[3] * EXPERTS] * LAYERS
    assert lora_section(adapter, SHAPES, None)["modules_to_save"] == ["head"]


@pytest.mark.fast
def test_an_adapter_of_the_bare_model_is_read(tmp_path):
    values, tensors, _ = written(tmp_path, adapters(["q/kernel", "tok"]))
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("model.m.", "model."): x for name, x in tensors.items()}, file)
    for path, x in adapter_values(read_adapter(tmp_path), leaves_of(values), TABLE).items():
        np.testing.assert_array_equal(x, values[path], err_msg=path)


@pytest.mark.fast
def test_parts_with_one_a_are_written_as_one(tmp_path):
    of = adapters(["a/kernel", "b/kernel", "c/kernel"])
    values = arrays(of)
    for name in "bc":
        values[f"lora/{name}/kernel/A"] = values["lora/a/kernel/A"]
    section = Lora(r=3, lora_alpha=6).model_dump()
    form = AdapterForm(AdapterRecord(section, of, []), TABLE)
    write_adapter(ArrayValues(values), tmp_path, form)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    b = [values[f"lora/{n}/kernel/B"][0].T for n in "abc"]
    begin = "base_model.model.m.h.0.qkv"
    np.testing.assert_array_equal(tensors[f"{begin}.lora_B.weight"], np.concatenate(b))
    np.testing.assert_array_equal(tensors[f"{begin}.lora_A.weight"], values["lora/a/kernel/A"][0].T)
    for path, x in adapter_values(read_adapter(tmp_path), leaves_of(values), TABLE).items():
        np.testing.assert_array_equal(x, values[path], err_msg=path)


TIED = MappingTable(
    [rule for rule in TABLE.rules if "head" not in rule.tensor],
    prefix="m.",
    tied={"m.head.weight": "m.tok.weight"},
)


def of_tied(folder, paths=("tok", "q/kernel"), **section):
    """(arrays, tensors, config) of a model whose embedding is the head too."""
    of = adapters(paths, dora=section.get("use_dora", False))
    values = {p: x for p, x in arrays(of).items() if p not in ("head", "head_bias")}
    own = Lora(**{"r": 3, "lora_alpha": 6, **section}).model_dump()
    record = AdapterRecord(own, of, section.get("modules_to_save") or [])
    write_adapter(ArrayValues(values), folder, AdapterForm(record, TIED))
    tensors = load_file(folder / "adapter_model.safetensors")
    return values, tensors, json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.fast
@pytest.mark.parametrize("saved", [False, True])
def test_a_tied_weight_is_in_both_of_its_modules(tmp_path, saved):
    begin = "base_model.model.m."
    if saved:
        values, tensors, config = of_tied(tmp_path, ["q/kernel"], modules_to_save=["tok"])
        pairs = {"head.weight": values["tok"], "tok.weight": values["tok"]}
        assert config["modules_to_save"] == ["head", "tok"]
    else:
        values, tensors, config = of_tied(tmp_path)
        a, b = values["lora/tok/A"], values["lora/tok/B"]
        pairs = {"tok.lora_embedding_A": a.T, "tok.lora_embedding_B": b.T}
        pairs |= {"head.lora_A.weight": b, "head.lora_B.weight": a}
        assert config["target_modules"] == ["head", "q", "tok"]
    for name, x in pairs.items():
        np.testing.assert_array_equal(tensors[begin + name], x, err_msg=name)
    found = adapter_values(read_adapter(tmp_path), leaves_of(values), TIED)
    assert found.keys() == {p for p in values if p.startswith("lora/")} | {*["tok"][: int(saved)]}
    for path, x in found.items():
        np.testing.assert_array_equal(x, values[path], err_msg=path)
    for name, x in pairs.items():  # one of the two differs, then is absent

        def differ(tensors, name=name, x=x):
            tensors[begin + name] = np.ascontiguousarray(x + 1)

        before = (tmp_path / "adapter_model.safetensors").read_bytes()
        change_tensors(tmp_path, differ)
        with pytest.raises(jaxspeed.PretrainedError, match="differ, which are one weight here"):
            adapted_weights(read_adapter(tmp_path), without_head(), TIED)
        change_tensors(tmp_path, lambda tensors, name=name: tensors.pop(begin + name))
        with pytest.raises(jaxspeed.PretrainedError, match="the embedding or its head alone"):
            adapted_weights(read_adapter(tmp_path), without_head(), TIED)
        (tmp_path / "adapter_model.safetensors").write_bytes(before)
    if not saved:
        change_config(tmp_path, alpha_pattern={"tok": 7})
        with pytest.raises(jaxspeed.PretrainedError, match="have other alphas: 7 and None"):
            adapted_weights(read_adapter(tmp_path), without_head(), TIED)


def without_head():
    return {path: shape for path, shape in SHAPES.items() if path not in ("head", "head_bias")}


@pytest.mark.fast
def test_dora_of_a_tied_weight_has_no_form(tmp_path):
    with pytest.raises(jaxspeed.PretrainedError, match="tok is the head too, and PEFT has no DoRA"):
        of_tied(tmp_path, use_dora=True)


# -- wrong input -----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """(folder, arrays) of an adapter."""
    return tmp_path, written(tmp_path, adapters(["q/kernel", "tok"]))[0]


def change_config(folder, **values):
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps(config))


def change_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type is 'IA3'; only 'LORA' is read"),
        ({"peft_type": None}, "peft_type is None"),
        ({"r": "8"}, "r is '8', not a positive integer"),
        ({"r": 0, "use_dora": 1}, r"(?s)r is 0, not .*use_dora is 1, not true or false"),
        ({"rank_pattern": {"q": -1}}, "rank_pattern is .*, not a mapping to positive integers"),
        ({"lora_bias": True}, "lora_bias is True: not supported"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is .* not supported"),
        ({"of_another_version": "x"}, "of_another_version is 'x': not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4', which changes the weights"),
        ({"bias": "some"}, "bias is 'some', not none, all or lora_only"),
        ({"modules_to_save": "head"}, "modules_to_save is 'head', not a list of names"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_read_is_one_error(saved, values, message):
    change_config(saved[0], **values)
    with pytest.raises(jaxspeed.PretrainedError, match=message):
        read_adapter(saved[0])


@pytest.mark.fast
def test_what_is_no_adapter_is_named(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(jaxspeed.PretrainedError, match="no such folder: not a saved adapter"):
        read_adapter(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(jaxspeed.PretrainedError, match="a file, not a folder: not a saved"):
        read_adapter(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(jaxspeed.PretrainedError, match=r"no adapter_config.json: not a saved"):
        read_adapter(tmp_path / "empty")
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(jaxspeed.PretrainedError, match="it is truncated"):
        read_adapter(folder)
    file.unlink()
    with pytest.raises(jaxspeed.PretrainedError, match=r"has no adapter_model.safetensors$"):
        read_adapter(folder)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(jaxspeed.PretrainedError, match=r"adapter_model.bin is a pickle"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(jaxspeed.PretrainedError, match="cannot be read"):
        read_adapter(folder)


Q = "base_model.model.m.h.0.q"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), r"h.0.q.lora_B.weight \[6, 3\] is missing"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((3, 7), np.float32)}),
            r"h.0.q.lora_A.weight has shape \[3, 7\], expected \[3, 6\]",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((2, 6), np.float32)}),
            "m.h.0.q has rank 2, but adapter_config.json says 3",
        ),
        (
            lambda t: t.update({f"{Q}.lora_magnitude_vector": np.zeros(6, np.float32)}),
            "lora_magnitude_vector .* is of no module of the model",
        ),
        (
            lambda t: t.update({"base_model.model.m.h.9.q.lora_A.weight": np.zeros((3, 6))}),
            r"h.9.q.lora_A.weight \[3, 6\] is of no module of the model \(nearest: .*h.[01].q",
        ),
        (lambda t: [t.pop(name) for name in [*t]] and t.update(x=np.zeros(2)), "x .* of no module"),
        (lambda t: t.update({"base_model.model.m.head.weight": np.zeros((2, 2))}), r"\[9, 6\]"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_model_is_one_error(saved, change, message):
    folder, values = saved
    change_config(folder, base_model_name_or_path="some/model")
    change_tensors(folder, change)
    adapter = read_adapter(folder)
    for read in (adapted_weights, lora_section):
        with pytest.raises(
            jaxspeed.PretrainedError, match=rf"(?s)'some/model', but not.*{message}"
        ):
            read(adapter, SHAPES, TABLE)
    with pytest.raises(jaxspeed.PretrainedError, match=message):
        adapter_values(adapter, leaves_of(values), TABLE)


@pytest.mark.fast
def test_the_first_ten_differences_are_listed(saved):
    folder, _ = saved
    change_tensors(folder, lambda t: t.update({f"x{i:02}": np.zeros(1) for i in range(15)}))
    with pytest.raises(jaxspeed.PretrainedError, match=r"(?s)x09.*and 5 more"):
        adapted_weights(read_adapter(folder), SHAPES, TABLE)


@pytest.mark.fast
def test_leaves_that_lack_an_adapter_or_its_rank_are_an_error(saved):
    folder, values = saved
    adapter, leaves = read_adapter(folder), leaves_of(values)
    small = leaves | {"lora/tok/A": (VOCAB, 2), "lora/tok/B": (2, EMBED)}
    with pytest.raises(jaxspeed.PretrainedError, match=r"rank 3, of which lora/tok/A \[9, 2\]"):
        adapter_values(adapter, small, TABLE)
    del leaves["lora/tok/A"]
    with pytest.raises(jaxspeed.PretrainedError, match="adapts tok, but the model has no lora/tok"):
        adapter_values(adapter, leaves, TABLE)


@pytest.mark.fast
def test_an_adapter_is_not_written_over_another(saved):
    with pytest.raises(jaxspeed.CheckpointError, match="contains an adapter already"):
        written(saved[0], adapters(["tok"]))


@pytest.mark.fast
def test_inputs_that_are_outputs_there_are_an_error(tmp_path):
    swapped = WeightDims((0,), (2, 3), (1,), "product")
    of = {"q/kernel": Adapter("q/kernel", SHAPES["q/kernel"], swapped, (3,), (2.0,))}
    with pytest.raises(jaxspeed.PretrainedError, match=r"q/kernel .* are the dims \[2, 3\], those"):
        written(tmp_path, of)


# -- engines and commands --------------------------------------------------------------------------

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"family": "phi3", "preset": "tiny"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": True},
    "lora": {
        "r": 2, "init_lora_weights": False, "target_modules": ["q_proj", "blocks[1:]/mlp/down"],
        "use_dora": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a checkpoint, a config that names its model, parameters, adapters)."""
    folder = tmp_path_factory.mktemp("run")
    engine = jaxspeed.initialize(config={**CONFIG, "mesh": {"data": 4, "tensor": 2}})
    engine.save_adapter(folder / "saved")
    engine.save_pretrained(folder / "merged", merge=True, dtype="fp32")
    engine.save_checkpoint(folder / "checkpoints")
    with pytest.raises(jaxspeed.PretrainedError, match=r"(?s)has adapters.*save_adapter"):
        engine.save_pretrained(folder / "refused")
    engine.wait()
    (folder / "model.json").write_text(json.dumps({**CONFIG, "lora": None}))
    params = {path: np.asarray(x) for path, x in engine.parameters.items()}
    return folder, params, engine.program.model.adapters


def exported(run, out, *words):
    folder = run[0]
    config = ("--config", str(folder / "model.json"))
    return main(["checkpoint", "export", str(folder / "checkpoints"), str(out), *words, *config])


def test_an_engine_s_adapters_are_its_leaves(run):
    folder, params, of = run
    form = hf_form("phi3")
    table = form.table(build("phi3", "tiny").config)
    found = adapter_values(read_adapter(folder / "saved"), leaves_of(params), table)
    assert found.keys() == {path for path in params if path.startswith("lora/")}
    for adapter in of.values():
        adapted = adapter.per_layer(adapter.ranks) > 0
        for path in adapter.shapes:
            there = found[path][adapted], params[path][adapted]
            np.testing.assert_array_equal(*there, err_msg=path)


def test_a_checkpoint_s_adapters_are_those_of_the_engine(run, tmp_path, capsys):
    assert exported(run, tmp_path / "out", "--format", "peft") == 0
    assert "adapter_config.json, adapter_model.safetensors" in capsys.readouterr().out
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (run[0] / "saved" / name).read_bytes()


def test_a_merged_checkpoint_is_the_formula(run, tmp_path):
    folder, params, of = run
    assert exported(run, tmp_path / "out", "--merge", "--dtype", "fp32") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "phi3"
    found = load_file(tmp_path / "out" / "model.safetensors")
    again = load_file(folder / "merged" / "model.safetensors")
    for name, x in again.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    down = "blocks/mlp/down/kernel"
    parts = {n: params[f"lora/{down}/{n}"] for n in ("A", "B", "magnitude")}
    expected = peft_values.merged(params[down].astype(np.float32), parts, of[down])
    for i in range(len(expected)):
        there = found[f"model.layers.{i}.mlp.down_proj.weight"]
        np.testing.assert_allclose(there, expected[i].T, rtol=1e-2)
        same = (there == params[down][i].astype(np.float32).T).all()
        assert same == (i == 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "hf"), "has adapters, .*--merge"),
        (("--format", "peft", "--merge"), "--merge writes Hugging Face's format"),
        (("--format", "native", "--merge"), "leave out --format native"),
    ],
)
def test_a_wrong_use_of_the_command_is_an_error(run, tmp_path, capsys, words, message):
    assert exported(run, tmp_path / "out", *words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_an_adapter_s_folder_alone_starts_an_engine_from_it(run, tmp_path, stage):
    folder, params, of = run
    config = {**CONFIG, "lora": {"adapter": str(folder / "saved")}}
    config["zero_optimization"] = {"stage": stage}
    engine = jaxspeed.initialize(config=config)
    model = engine.program.model
    for path, adapter in of.items():
        there = model.adapters[path]
        same = ("dims", "dora", "rank", "stack")
        assert [getattr(there, n) for n in same] == [getattr(adapter, n) for n in same]
        ranks = adapter.per_layer(adapter.ranks)
        assert (there.per_layer(there.ranks) == ranks).all()
        for leaf in adapter.shapes:
            found = np.asarray(engine.parameters[leaf])[ranks > 0]
            np.testing.assert_array_equal(found, params[leaf][ranks > 0], err_msg=leaf)
    engine.save_adapter(tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / "saved" / name).read_bytes()


@pytest.mark.sampled
def test_settings_beside_an_adapter_may_not_contradict_it(run):
    config = json.loads((run[0] / "saved" / "adapter_config.json").read_text())
    same = {key: config[key] for key in ("r", "use_dora")}
    lora = {"adapter": str(run[0] / "saved"), "lora_dropout": 0.1, **same}
    engine = jaxspeed.initialize(config={**CONFIG, "lora": lora})
    assert {a.dropout for a in engine.program.model.adapters.values()} == {0.1}
    lora |= {"r": 16, "use_rslora": True}
    with pytest.raises(
        jaxspeed.ConfigError, match=r"lora.r is 16, lora.use_rslora is True; remove"
    ):
        jaxspeed.initialize(config={**CONFIG, "lora": lora})
    lora = {"adapter": str(run[0] / "none")}
    with pytest.raises(jaxspeed.PretrainedError, match="no such folder"):
        jaxspeed.initialize(config={**CONFIG, "lora": lora})


def test_a_run_without_adapters_has_none_to_export(tmp_path, capsys):
    config = {k: v for k, v in CONFIG.items() if k != "lora"}
    engine = jaxspeed.initialize(config=config)
    with pytest.raises(jaxspeed.PretrainedError, match="no adapters"):
        engine.save_adapter(tmp_path / "adapter")
    engine.save_checkpoint(tmp_path / "checkpoints")
    engine.wait()
    (tmp_path / "model.json").write_text(json.dumps(config))
    for words, code in ((["--format", "peft"], 1), (["--merge"], 2)):
        assert exported((tmp_path,), tmp_path / "out", *words) == code
        assert "no adapters" in " ".join(capsys.readouterr().err.split())
