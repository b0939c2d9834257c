"""Experts in the forms of published folders: per expert, fused, in fp8 and in MXFP4."""

import ml_dtypes
import numpy as np
import pytest
from jaxspeed.models import build, family, from_pretrained, hf_form

import jaxspeed
from jaxspeed.interop.mapping import bind
from jaxspeed.user_models import adapt_model
from tests.interop import folders

pytestmark = pytest.mark.fast
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def drawn(name):
    """(the tiny preset, its config.json, random tensors by name)."""
    module, form = family(name), hf_form(name)
    config = module.PRESETS["tiny"]
    table = form.table(config)
    model = adapt_model(lambda rngs: module.build(config, rngs), module.loss)
    shapes = {leaf.path: leaf.shape for leaf in model.leaves}
    shapes |= {path: model.variables[path].shape for path in table.variables}
    rng = np.random.default_rng(0)
    tensors = {
        tensor: rng.normal(size=shape).astype(np.float32)
        for tensor, shape in bind(table, shapes).tensors.items()
    }
    return config, form.write_config(config), tensors, shapes


def parameters(folder, shapes):
    weights = from_pretrained(folder).weights
    weights.check(shapes)
    index = {path: tuple(slice(0, n) for n in shape) for path, shape in shapes.items()}
    return {path: weights.read(path, index[path], np.float32) for path in shapes}


def test_experts_of_one_tensor_are_those_of_many(tmp_path):
    """As transformers 5 has them in memory, with the names that it has there."""
    config, values, tensors, shapes = drawn("mixtral")
    many = parameters(folders.folder(tmp_path / "many", values, tensors), shapes)
    fused = {}
    for name, x in tensors.items():
        block, is_mixture, rest = name.partition(".block_sparse_moe.")
        if not is_mixture:
            fused[name] = x
        elif rest == "gate.weight":
            fused[f"{block}.mlp.gate.weight"] = x
    for layer in range(config.num_hidden_layers):
        of = f"model.layers.{layer}.block_sparse_moe.experts"
        experts = range(config.num_experts)
        gate, up, down = (
            np.stack([tensors[f"{of}.{i}.{name}.weight"] for i in experts])
            for name in ("w1", "w3", "w2")
        )
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    one = parameters(folders.folder(tmp_path / "one", values, fused), shapes)
    for path, x in many.items():
        np.testing.assert_array_equal(one[path], x, err_msg=path)
    np.testing.assert_array_equal(
        many["blocks/mlp/w_up"][1, 3],
        tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"].T,
    )


def test_deepseek_in_fp8_with_a_layer_that_predicts_further_tokens(tmp_path):
    config, values, tensors, shapes = drawn("deepseek")
    values["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
    }  # fmt: skip
    stored, expected = {}, {}
    rng = np.random.default_rng(1)
    for name, x in tensors.items():
        stored[name] = expected[name] = x
        if "_proj" in name and x.ndim == 2:
            low = x.astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.5, 2, [-(-n // 128) for n in x.shape]).astype(np.float32)
            stored |= {name: low, f"{name}_scale_inv": scale}
            wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
            expected[name] = low.astype(np.float32) * wide
    further = f"model.layers.{config.num_hidden_layers}"
    for name, x in tensors.items():
        if name.startswith("model.layers.2."):
            stored[name.replace("model.layers.2", further)] = x
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head"):
        stored[f"{further}.{name}.weight"] = np.ones((2, 2), np.float32)
    found = parameters(folders.folder(tmp_path, values, stored), shapes)
    # The first layer is dense; the stack of mixtures begins with the second.
    gate = expected["model.layers.2.mlp.experts.5.gate_proj.weight"]
    np.testing.assert_array_equal(found["blocks/mlp/w_gate"][1, 5], gate.T)
    down = expected["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(found["dense_blocks/mlp/down/kernel"][0], down.T)
    rotated = expected["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"][config.kv_lora_rank :]
    np.testing.assert_array_equal(found["blocks/attn/k_rotated/kernel"][0], rotated.T)
    bias = tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(found["expert_bias"][1], bias)


def test_fields_that_a_deepseek_v3_lacks_are_those_of_its_configuration(tmp_path):
    values = hf_form("deepseek").write_config(family("deepseek").PRESETS["tiny"])
    given = {"num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 4}
    for name in ("first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob"):
        del values[name]
    del values["routed_scaling_factor"]
    folders.folder(tmp_path, values | given, {})
    found = from_pretrained(tmp_path).config
    assert (found.num_dense_layers, found.num_groups, found.num_limited_groups) == (3, 8, 4)
    assert (found.norm_topk_prob, found.routed_scaling_factor) == (True, 2.5)


@pytest.mark.parametrize("written", [None, 0])
def test_a_deepseek_without_shared_experts_and_dense_layers(tmp_path, written):
    module, form = family("deepseek"), hf_form("deepseek")
    sizes = {"num_shared_experts": 0, "num_dense_layers": 0}
    config = build("deepseek", "tiny", sizes).config
    model = adapt_model(lambda rngs: module.build(config, rngs), module.loss)
    shapes = {leaf.path: leaf.shape for leaf in model.leaves} | {
        path: model.variables[path].shape for path in form.table(config).variables
    }
    assert not any("shared" in path or "dense" in path for path in shapes)
    tensors = {
        name: np.ones(shape, np.float32)
        for name, shape in bind(form.table(config), shapes).tensors.items()
    }
    if written == 0:  # as transformers writes them
        for name in ("gate", "up"):
            empty = np.ones((0, config.hidden_size), np.float32)
            tensors[f"model.layers.1.mlp.shared_experts.{name}_proj.weight"] = empty
    values = form.write_config(config) | {"n_shared_experts": written}
    found = parameters(folders.folder(tmp_path, values, tensors), shapes)
    assert found.keys() == shapes.keys()


def test_gpt_oss_in_mxfp4(tmp_path):
    config, values, tensors, shapes = drawn("gpt_oss")
    values["quantization_config"] = {"quant_method": "mxfp4"}
    rng = np.random.default_rng(1)
    stored, expected = {}, {}
    for name, x in tensors.items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = x
            continue
        experts, columns, rows = x.shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 130, blocks.shape[:3], dtype=np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, rows, columns)
        sign = np.where(codes & 8, -1, 1)
        power = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=-1)
        expected[name] = (sign * FP4[codes & 7] * power).astype(np.float32).swapaxes(1, 2)
    found = parameters(folders.folder(tmp_path, values, stored), shapes)
    both = expected["model.layers.3.mlp.experts.gate_up_proj"]  # [experts, in, (out, gate and up)]
    np.testing.assert_array_equal(found["blocks/mlp/w_gate"][3], both[..., 0::2])
    np.testing.assert_array_equal(found["blocks/mlp/w_up"][3], both[..., 1::2])
    down = expected["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(found["blocks/mlp/w_down"][1], down)
    assert config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"num_experts_per_tok": 5}, "k = 5 of 4 experts"),
        ("mixtral", {"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers is"),
        ("deepseek", {"n_group": 3}, "16 experts do not form 3 equal groups"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func 'softmax'; deepseek_v3 has"),
        ("deepseek", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, which is neg"),
        ("deepseek", {"first_k_dense_replace": 3}, "leaves none of 3 layers with experts"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is False"),
    ],
)
def test_what_a_mixture_lacks_is_an_error(tmp_path, name, fields, message):
    values = hf_form(name).write_config(family(name).PRESETS["tiny"])
    values |= {"moe_intermediate_size": 32} | fields
    folders.folder(tmp_path, values, {})
    with pytest.raises(jaxspeed.PretrainedError, match=message):
        from_pretrained(tmp_path)
