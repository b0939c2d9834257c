"""Adapters in PEFT's files, against PEFT: keys, config, logits, in both directions."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import from_pretrained
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.checkpoint.header import AdapterRecord
from jaxspeed.config.lora_section import Lora
from jaxspeed.interop import MappingTable, TensorRule
from jaxspeed.interop.peft import adapted_weights, adapter_values, lora_section, read_adapter
from jaxspeed.interop.peft_config import AdapterForm
from jaxspeed.interop.peft_export import write_adapter
from tests.interop import peft_values
from tests.interop.test_transformers import CASES, PHI3, SIZES, bound_model, folder_of, read

SMALL = {"num_hidden_layers": 2, "vocab_size": 67, "max_position_embeddings": 64}
MODELS = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15,
    }),
    "llama": ("Llama", "LlamaForCausalLM", SIZES | SMALL | {"attention_bias": True}),
    "phi3": ("Phi3", "Phi3ForCausalLM", SIZES | SMALL | PHI3),
    "vit": ("ViT", "ViTForImageClassification", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": 16, "patch_size": 8, "num_labels": 7,
        "initializer_range": 0.15,
    }),
}  # fmt: skip
MODELS["gpt2, tied"] = MODELS["gpt2"]
MODELS["llama, tied"] = ("Llama", "LlamaForCausalLM", MODELS["llama"][2] | {
    "tie_word_embeddings": True,
})  # fmt: skip
MODELS["mixtral"] = ("Mixtral", "MixtralForCausalLM", SIZES | SMALL | {
    "num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 32, "intermediate_size": 48,
})  # fmt: skip
CASES |= {f"small {name}": case for name, case in MODELS.items()}
NAMES = {
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "vit": ["q_proj", "fc2", "projection"],  # a convolution
}
LAYER = {
    "gpt2": "h.1.attn.c_attn", "llama": "layers.1.self_attn.v_proj",
    "phi3": "layers.1.self_attn.qkv_proj", "vit": "layers.1.attention.q_proj",
}  # fmt: skip
TABLE = {"gpt2": "wpe", "llama": "embed_tokens", "phi3": "embed_tokens", "vit": "o_proj"}
HEAD = {"llama": "lm_head", "phi3": "lm_head", "gpt2": "ln_f", "vit": "classifier"}


def options(model, kind):
    task = None if model == "vit" else "CAUSAL_LM"
    made = {"r": 4, "lora_alpha": 12, "target_modules": NAMES[model], "task_type": task}
    at = LAYER[model]
    return made | {
        "plain": {},
        "rslora": {"use_rslora": True, "lora_alpha": 3, "lora_dropout": 0.25},
        "dora": {"use_dora": True},
        "patterns": {
            "rank_pattern": {at: 6, NAMES[model][1]: 2}, "alpha_pattern": {at: 5},
            "layers_to_transform": [1] if model == "phi3" else None,
        },
        "embeddings": {"target_modules": [*NAMES[model], TABLE[model]], "use_dora": True},
        "saved": {"modules_to_save": [HEAD[model]], "bias": "lora_only"},
        "biases": {"bias": "all", "init_lora_weights": "gaussian"},
        "biases of a layer": {"bias": "lora_only", "layers_to_transform": [1]},
    }[kind]  # fmt: skip


KINDS = ("plain", "rslora", "dora", "patterns", "embeddings", "saved", "biases",
         "biases of a layer")  # fmt: skip
BY_DEFAULT = {("gpt2", "embeddings"), ("llama", "patterns"), ("llama", "saved"), ("phi3", "dora"),
              ("gpt2", "rslora"), ("llama", "embeddings"), ("vit", "saved"),
              ("llama", "biases of a layer")}  # fmt: skip
IN_ENGINES = {("gpt2", "rslora"), ("llama", "embeddings"), ("llama", "biases of a layer")}
both = pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(m, k, marks=() if (m, k) in BY_DEFAULT else pytest.mark.full)
        for m in NAMES
        for k in KINDS
    ],
)
TOKENS = np.random.default_rng(0).integers(0, 67, (2, 40))
__all__ = ["folder_of"]


IMAGES = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)


def arguments(model):
    return (
        {"pixel_values": IMAGES.transpose(0, 3, 1, 2)} if model == "vit" else {"input_ids": TOKENS}
    )


def logits_of(model, params, x=TOKENS):
    return jax.jit(lambda params: bound_model(model, params)(jnp.asarray(x)))(params)


def adapters_of(weights, shapes, section, dims):
    """Adapters with the ranks and alphas of an adapter that was read."""
    made = {}
    for path, weight in weights.items():
        layers = len(weight.ranks) if weight.ranks.ndim else 1
        ranks, alphas = (x.reshape(layers, -1)[:, 0] for x in (weight.ranks, weight.alphas))
        scales = alphas / np.maximum(1, ranks) ** (0.5 if section.use_rslora else 1)
        made[path] = Adapter(
            path, shapes[path], dims[path], tuple(ranks.tolist()), tuple(scales.tolist()),
            dora=section.use_dora,
        )  # fmt: skip
    return made


def merged(params, values, adapters):
    """W + s A B, with DoRA m (W + s A B) / |W + s A B|, written out."""
    made = {**params, **{path: x for path, x in values.items() if not path.startswith("lora/")}}
    for path, adapter in adapters.items():
        of = {name: values.get(f"lora/{path}/{name}") for name in ("A", "B", "magnitude")}
        made[path] = peft_values.merged(made[path], of, adapter)
    return made


@pytest.fixture(scope="module")
def theirs(references, folder_of, tmp_path_factory):
    """(base folder, adapter folder, logits) of PEFT's own adapter."""
    made = {}

    def of(model, kind):
        if (model, kind) not in made:
            base, folder = folder_of(f"small {model}"), tmp_path_factory.mktemp("adapter")
            logits = references.call(
                "adapter_files.save", case=MODELS[model], options=options(model, kind), base=base,
                folder=folder, arguments=arguments(model),
            )  # fmt: skip
            made[model, kind] = base, folder, logits
        return made[model, kind]

    return of


def opened(base, folder):
    """(our model, its parameters, shapes of all leaves, the adapter, its section, adapters)."""
    pretrained = from_pretrained(base)
    model, params = read(pretrained)
    shapes = {path: x.shape for path, x in params.items()}
    table = pretrained.weights.table
    adapter = read_adapter(folder)
    section = Lora(**lora_section(adapter, shapes, table))
    weights = adapted_weights(adapter, shapes, table)
    dims = peft_values.usual_dims(table, shapes)
    adapters = adapters_of(weights, shapes, section, dims)
    leaves = shapes | {p: s for a in adapters.values() for p, s in a.shapes.items()}
    return model, params, leaves, table, adapter, section, adapters


@pytest.mark.default_cases(
    "gpt2-embeddings", "llama-embeddings", "llama-saved", "llama-biases of a layer"
)
@both
def test_peft_s_adapter_is_read_and_written_again_as_it_was(theirs, model, kind, tmp_path):
    base, folder, expected = theirs(model, kind)
    ours, params, leaves, table, adapter, section, adapters = opened(base, folder)
    values = adapter_values(adapter, leaves, table)
    values |= {  # the model's own where the adapter has none
        path: np.where(x.mask, params[path], x.data)
        for path, x in values.items()
        if isinstance(x, np.ma.MaskedArray)
    }
    x = IMAGES if model == "vit" else TOKENS
    found = logits_of(ours, merged(params, values, adapters), x)
    assert np.abs(expected - logits_of(ours, params, x)).max() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)

    before = json.loads((folder / "adapter_config.json").read_text())
    own = {**section.model_dump(), **{k: before[k] for k in (
        "target_modules", "rank_pattern", "alpha_pattern", "layers_to_transform",
        "modules_to_save", "init_lora_weights",
    )}}  # fmt: skip
    record = AdapterRecord(own, adapters, [p for p in values if not p.startswith("lora/")])
    config = json.loads((base / "config.json").read_text())
    form = AdapterForm(record, table, config, str(base))
    write_adapter(peft_values.ArrayValues(params | values), tmp_path, form)
    after = json.loads((tmp_path / "adapter_config.json").read_text())
    for config in (before, after):
        config["target_modules"].sort()
    assert after == before
    mine, other = (load_file(f / "adapter_model.safetensors") for f in (tmp_path, folder))
    assert mine.keys() == other.keys()
    for name in other:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)


# Ours have factors of their own for queries, keys and values, which are one module there: ranks by
# the end of the path, for each layer.
OURS = {
    "gpt2": ({"use_dora": True}, {"q_proj": [4, 4], "v_proj": [0, 4], "up": [0, 2]}),
    "phi3": (
        {"use_rslora": True, "alpha_pattern": {"v_proj": 3}},
        {"q_proj": [4, 4], "k_proj": [2, 2], "v_proj": [4, 4], "gate": [3, 4], "up": [3, 4]},
    ),
    "llama": ({"bias": "lora_only"}, {"q_proj": [4, 0], "down": [4, 4], "embed": [5]}),
    # The embedding is the head too.
    "gpt2, tied": ({}, {"embed": [4], "o_proj": [4, 4]}),
    "llama, tied": ({"use_rslora": True}, {"embed": [3], "q_proj": [4, 4]}),
}  # fmt: skip


def random_adapters(model, shapes, table):
    """(the section, adapters, their values)."""
    changed, ranks = OURS[model]
    section = Lora(r=4, lora_alpha=8, **changed)
    dims = peft_values.usual_dims(table, shapes)
    adapters, values, rng = {}, {}, np.random.default_rng(3)
    for path in dims:
        name = path.split("/")[-2]
        if name not in ranks or path.endswith("bias"):
            continue
        alpha = section.alpha_pattern.get(name, 8)
        divisors = np.maximum(1, ranks[name]) ** (0.5 if section.use_rslora else 1)
        adapter = adapters[path] = Adapter(
            path, shapes[path], dims[path], tuple(ranks[name]), tuple(alpha / divisors),
            dora=section.use_dora,
        )  # fmt: skip
        for leaf, shape in adapter.shapes.items():
            values[leaf] = 0.1 * rng.normal(size=shape).astype(np.float32)
        for at, rank in np.ndenumerate(adapter.per_layer(adapter.ranks)):  # as padded ones are
            values[adapter.leaf("A")][at][..., rank:] = 0
            values[adapter.leaf("B")][at][rank:] = 0
        if section.use_dora:
            values[adapter.leaf("magnitude")] = np.abs(values[adapter.leaf("magnitude")]) + 1
    return section, adapters, values


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.full if m == "llama, tied" else ()) for m in OURS],
)
def test_adapters_of_ours_are_loaded_by_peft(references, folder_of, model, tmp_path):
    base = folder_of(f"small {model}")
    pretrained = from_pretrained(base)
    ours, own = read(pretrained)
    table, shapes = pretrained.weights.table, {path: x.shape for path, x in own.items()}
    section, adapters, values = random_adapters(model, shapes, table)
    biases = [p for p in own if p.rpartition("/")[0] + "/kernel" in adapters and "bias" in p]
    trained = biases if section.bias == "lora_only" else []
    params = own | values
    for path in trained:  # in the layers that are adapted
        ranks = np.array(adapters[path.replace("bias", "kernel")].ranks)
        on = (ranks > 0).reshape(-1, *[1] * (own[path].ndim - 1))
        params[path] = own[path] + np.float32(0.5) * on
    config = json.loads((base / "config.json").read_text())
    record = AdapterRecord(section.model_dump(), adapters, trained)
    arrays = peft_values.ArrayValues(params)
    write_adapter(arrays, tmp_path / "adapter", AdapterForm(record, table, config, str(base)))

    expected = logits_of(ours, merged(own, params, adapters))
    arguments = {"input_ids": TOKENS}
    found = references.call(
        "adapter_files.loaded", base=base, folder=tmp_path / "adapter", arguments=arguments,
        again=tmp_path / "again",
    )  # fmt: skip
    assert np.abs(expected - logits_of(ours, own)).max() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    there, again = (
        json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("adapter", "again")
    )
    for config in (there, again):
        config["target_modules"].sort()
    assert there == again
    mine, other = (
        load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "again")
    )
    assert mine.keys() == other.keys()
    for name in other:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)

    leaves = {path: x.shape for path, x in params.items()}
    adapter = read_adapter(tmp_path / "adapter")
    found = adapter_values(adapter, leaves, table)
    assert found.keys() == {*values, *trained}
    # B of a part with another scale than the first one's is multiplied, so it is rounded twice.
    rescaled = ("k_proj/kernel/B", "v_proj/kernel/B") if model == "phi3" else ()
    for path, x in found.items():
        if isinstance(x, np.ma.MaskedArray):  # the bias of a layer that is not adapted
            np.testing.assert_array_equal(x.compressed(), params[path][~x.mask], err_msg=path)
        elif path.endswith(rescaled):
            np.testing.assert_allclose(x, params[path], rtol=2e-7, err_msg=path)
        elif not path.endswith("magnitude"):
            np.testing.assert_array_equal(x, params[path], err_msg=path)
    weights = adapted_weights(adapter, shapes, table)
    assert weights.keys() == adapters.keys()
    for path, weight in weights.items():
        ranks, scales = (
            adapters[path].per_layer(of) for of in (adapters[path].ranks, adapters[path].scales)
        )
        np.testing.assert_array_equal(weight.ranks, ranks, err_msg=path)
        divisors = np.maximum(1, ranks) ** (0.5 if section.use_rslora else 1)
        there = (weight.alphas / divisors)[ranks > 0]
        np.testing.assert_array_equal(there, scales[ranks > 0], err_msg=path)
        for at in zip(*np.nonzero(ranks), strict=True) if section.use_dora else ():
            name = adapters[path].leaf("magnitude")
            np.testing.assert_array_equal(found[name][at], values[name][at], err_msg=name)


@pytest.mark.default_cases("llama-biases of a layer")
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(m, k, marks=() if (m, k) in IN_ENGINES else pytest.mark.full)
        for m in NAMES
        for k in KINDS
        if m != "vit"
    ],
)
def test_an_engine_starts_from_peft_s_adapter(theirs, model, kind):
    base, folder, expected = theirs(model, kind)
    config = {
        "train_batch_size": 8, "optimizer": {"type": "SGD"}, "model": {"pretrained": str(base)},
        "lora": {"adapter": str(folder)}, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    engine = jaxspeed.initialize(config=config)
    merged = engine.module(jnp.asarray(TOKENS))
    np.testing.assert_allclose(merged, expected, atol=1e-4, rtol=0)
    logarithms = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    of_targets = np.take_along_axis(logarithms[:, :-1], TOKENS[:, 1:, None], -1)
    found = engine.eval_batch({"tokens": np.tile(TOKENS, (4, 1))})["loss"]
    np.testing.assert_allclose(found, -of_targets.mean(), atol=1e-4, rtol=0)


def test_experts_are_parameters_as_in_peft(references, folder_of, tmp_path):
    layers, experts, embed, inner = 2, 3, 32, 48
    block = "model.layers.{layer}.mlp.experts"
    table = MappingTable([
        TensorRule(
            f"{block}.gate_up_proj", ("gate", "up"),
            "expert (part out) in -> layer expert in out",
        ),
        TensorRule(f"{block}.down_proj", "down", "expert out in -> layer expert in out"),
    ])  # fmt: skip
    shapes = dict.fromkeys(("gate", "up"), (layers, experts, embed, inner))
    shapes["down"] = (layers, experts, inner, embed)
    base = folder_of("small mixtral")
    asked = {
        "r": 2, "lora_alpha": 6, "target_modules": [], "task_type": "CAUSAL_LM",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    references.call(
        "adapter_files.save", case=MODELS["mixtral"], options=asked, base=base,
        folder=tmp_path / "theirs", arguments={"input_ids": TOKENS},
    )  # fmt: skip
    before, after = (
        references.call("adapter_files.parameters", base=base, folder=folder)
        for folder in (None, tmp_path / "theirs")
    )
    adapter = read_adapter(tmp_path / "theirs")
    weights = adapted_weights(adapter, shapes, table)
    dims = peft_values.usual_dims(table, shapes)
    section = Lora(**lora_section(adapter, shapes, table))
    of = adapters_of(weights, shapes, section, dims)
    leaves = shapes | {leaf: shape for a in of.values() for leaf, shape in a.shapes.items()}
    values = adapter_values(adapter, leaves, table)
    for i in range(layers):
        deltas = {
            path: 3
            * np.einsum("eir,ero->eoi", values[f"lora/{path}/A"][i], values[f"lora/{path}/B"][i])
            for path in shapes
        }
        joined = {
            "gate_up_proj": np.concatenate([deltas["gate"], deltas["up"]], axis=1),
            "down_proj": deltas["down"],
        }
        for name, delta in joined.items():
            name = f"model.layers.{i}.mlp.experts.{name}"
            assert np.abs(delta).max() > 0.01
            np.testing.assert_allclose(after[name] - before[name], delta, atol=1e-5, err_msg=name)
    config = json.loads((base / "config.json").read_text())
    own = {**section.model_dump(), **{k: asked[k] for k in ("target_modules", "target_parameters")}}
    form = AdapterForm(AdapterRecord(own, of, []), table, config, str(base))
    write_adapter(peft_values.ArrayValues(arrays_of(shapes) | values), tmp_path / "ours", form)
    ours, theirs = (
        json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("ours", "theirs")
    )
    ours["target_parameters"].sort()
    theirs["target_parameters"].sort()
    assert ours == theirs
    ours, theirs = (
        load_file(tmp_path / f / "adapter_model.safetensors") for f in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.sampled
def test_an_engine_trains_peft_s_adapter_of_a_familys_experts(references, folder_of, tmp_path):
    """Its keys are those of the modules in memory, whatever the tensors of the base are named."""
    base, theirs, ours = folder_of("small mixtral"), tmp_path / "theirs", tmp_path / "ours"
    asked = {
        "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    arguments = {"input_ids": TOKENS}
    expected = references.call(
        "adapter_files.save", case=MODELS["mixtral"], options=asked, base=base, folder=theirs,
        arguments=arguments,
    )  # fmt: skip
    config = {
        "train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": {"pretrained": str(base)}, "lora": {"adapter": str(theirs)},
    }  # fmt: skip
    engine = jaxspeed.initialize(config=config)
    before = engine.module(jnp.asarray(TOKENS))
    np.testing.assert_allclose(before, expected, atol=1e-4, rtol=0)
    engine.train_batch({"tokens": np.tile(TOKENS, (4, 1))})
    trained = engine.module(jnp.asarray(TOKENS))
    assert np.abs(trained - before).max() > 1e-3
    engine.save_adapter(ours)
    found = references.call(
        "adapter_files.loaded", base=base, folder=ours, arguments=arguments,
        again=tmp_path / "again",
    )  # fmt: skip
    np.testing.assert_allclose(found, trained, atol=1e-4, rtol=0)


def test_an_adapter_of_a_module_for_each_expert_is_read(folder_of, tmp_path):
    """As PEFT wrote it with transformers 4."""
    pretrained = from_pretrained(folder_of("small mixtral"))
    table = pretrained.weights.table
    shapes = {path: x.shape for path, x in read(pretrained)[1].items()}
    dims = peft_values.usual_dims(table, shapes)
    section, rng = Lora(r=2), np.random.default_rng(0)
    adapters = {
        path: Adapter(path, shapes[path], dims[path], (2,), (4.0,))
        for path in ("blocks/mlp/w_gate", "blocks/mlp/w_down", "blocks/attn/q_proj/kernel")
    }
    values = {leaf: rng.normal(size=n) for a in adapters.values() for leaf, n in a.shapes.items()}
    record = AdapterRecord(section.model_dump(), adapters, [])
    arrays = peft_values.ArrayValues(arrays_of(shapes) | values)
    write_adapter(arrays, tmp_path / "a", AdapterForm(record, replace(table, memory=None)))
    names = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert any(".block_sparse_moe.experts.2.w2.lora_A" in name for name in names)
    leaves = shapes | {path: x.shape for path, x in values.items()}
    found = adapter_values(read_adapter(tmp_path / "a"), leaves, table)
    assert found.keys() == values.keys()
    for path, x in found.items():
        np.testing.assert_array_equal(x, values[path].astype(np.float32), err_msg=path)


@pytest.mark.parametrize(
    ("model", "changed", "adapted", "trained"),
    [
        # PEFT's "all-linear", our default where no parameters are named, has other modules too.
        ("mixtral", {"target_parameters": ["w_down"]}, "blocks/mlp/w_down", []),
        # For PEFT "norm" is the name of the norms in layers too.
        ("llama", {"modules_to_save": ["norm"]}, "blocks/attn/q_proj/kernel", ["norm/scale"]),
    ],
)
def test_names_of_ours_are_of_the_same_modules_in_peft(
    references, folder_of, tmp_path, model, changed, adapted, trained
):
    base, ours, again = folder_of(f"small {model}"), tmp_path / "ours", tmp_path / "again"
    pretrained = from_pretrained(base)
    table, own = pretrained.weights.table, read(pretrained)[1]
    dims = peft_values.usual_dims(table, {path: x.shape for path, x in own.items()})
    adapter = Adapter(adapted, own[adapted].shape, dims[adapted], (2,), (4.0,))
    rng = np.random.default_rng(0)
    values = {path: rng.normal(size=n).astype(np.float32) for path, n in adapter.shapes.items()}
    config = json.loads((base / "config.json").read_text())
    record = AdapterRecord(Lora(r=2, **changed).model_dump(), {adapted: adapter}, trained)
    form = AdapterForm(record, table, config, str(base))
    write_adapter(peft_values.ArrayValues(own | values), ours, form)
    references.call(
        "adapter_files.loaded", base=base, folder=ours, arguments={"input_ids": TOKENS}, again=again
    )
    mine, other = (load_file(f / "adapter_model.safetensors") for f in (ours, again))
    assert mine.keys() == other.keys()
    for name in other:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)
    assert (ours / "adapter_config.json").read_text() == (again / "adapter_config.json").read_text()


@pytest.mark.sampled
def test_a_section_names_modules_as_hugging_face_does(folder_of):
    base = str(folder_of("small mixtral"))
    lora = {
        "r": 2, "target_modules": ["self_attn.q_proj", "lm_head"], "rank_pattern": {"lm_head": 3},
        "target_parameters": ["layers.1.mlp.experts.gate_up_proj"], "modules_to_save": ["mlp.gate"],
    }  # fmt: skip
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "lora": lora}
    for model in ({"pretrained": base}, {"family": "mixtral", "preset": "tiny"}):
        engine = jaxspeed.initialize(config=config | {"model": model})
        ranks = {path: a.ranks for path, a in engine.program.model.adapters.items()}
        (layers,) = {len(r) for path, r in ranks.items() if "w_" in path}
        assert ranks == {
            "blocks/attn/q_proj/kernel": (2,),
            "blocks/mlp/w_gate": (0, 2, *[0] * (layers - 2)),
            "blocks/mlp/w_up": (0, 2, *[0] * (layers - 2)),
            "head/table": (3,),
        }
        own = [row.path for row in engine.program.table if row.leaf.trainable]
        assert [path for path in own if not path.startswith("lora/")] == ["blocks/mlp/router"]


def arrays_of(shapes):
    return {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}


@pytest.mark.sampled
def test_peft_does_not_take_shared_experts_and_dense_layers_for_experts(
    references, folder_of, tmp_path
):
    """Their names in `target_modules` are those of experts to PEFT, which drops the adapters."""
    base = folder_of("deepseek_v3")
    lora = {
        "r": 2, "target_modules": ["q_b_proj", "up_proj", "gate_proj", "down_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "init_lora_weights": False,
    }  # fmt: skip
    config = {
        "model": {"pretrained": str(base)}, "lora": lora, "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine = jaxspeed.initialize(config=config)
    engine.save_adapter(tmp_path / "ours")
    found = references.call(
        "adapter_files.loaded", base=base, folder=tmp_path / "ours",
        arguments={"input_ids": TOKENS}, again=tmp_path / "again",
    )  # fmt: skip
    ours, theirs = (
        load_file(tmp_path / f / "adapter_model.safetensors") for f in ("ours", "again")
    )
    assert ours.keys() == theirs.keys()
    logits = jax.jit(lambda tokens: engine.module(tokens))(TOKENS)
    np.testing.assert_allclose(logits, found, atol=1e-4, rtol=0)
