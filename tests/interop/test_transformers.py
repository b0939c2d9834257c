"""Each family against `transformers`: logits, loss, gradients, and tensors that come back."""

import dataclasses
import itertools
import json
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import from_pretrained
from jaxspeed.models.classification_hf import DECODERS
from safetensors.numpy import load_file, save_file

import jaxspeed
from jaxspeed.interop import save_pretrained
from jaxspeed.interop.hf_folder import PretrainedFolder
from jaxspeed.interop.mapping import bind
from jaxspeed.interop.safetensors import TensorFile
from jaxspeed.train import build_program
from jaxspeed.user_models import adapt_model
from tests.interop import folders
from tests.support.documents import ROOT, blocks, shell_commands

VOCAB, SEQ = 199, 512
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
    "original_max_position_embeddings": 256, "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
}  # fmt: skip
# Without padding: torch has no gradient of a padding token's embedding.
GEMMA = {
    "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 100, "pad_token_id": None,
}  # fmt: skip
PHI3 = {"pad_token_id": None}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.15, "residual_multiplier": 0.7,
    "logits_scaling": 1.6,
}  # fmt: skip
SMOLLM3 = {"num_hidden_layers": 4, "pad_token_id": None, "tie_word_embeddings": False}
GLM = {"head_dim": 16, "pad_token_id": None}
# With ALiBi, transformers' own attention in place of torch's adds the biases twice (5.24).
FALCON = {
    name: SIZES[name]
    for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "max_position_embeddings", "bos_token_id", "eos_token_id", "initializer_range",
    )
}  # fmt: skip
COHERE = {"pad_token_id": None, "logit_scale": 0.5}
BERT = {"pad_token_id": None} | {
    name: SIZES[name]
    for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "vocab_size", "max_position_embeddings", "initializer_range",
    )
}  # fmt: skip
MODERNBERT = BERT | {"num_hidden_layers": 5, "local_attention": 60}
T5 = {
    "d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": VOCAB, "decoder_start_token_id": 0,
}  # fmt: skip
LATENT = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "pad_token_id": None,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
# name: (configuration class, model class, fields)
CASES = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15,
    }),
    "gpt2, untied": ("GPT2", "GPT2LMHeadModel", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "n_inner": 80,
        "initializer_range": 0.15,
    }),
    "gpt2, relu, scaled by layers": ("GPT2", "GPT2LMHeadModel", {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15,
        "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
    }),
    "gpt2, gelu, without a scale": ("GPT2", "GPT2LMHeadModel", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 512,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
        "activation_function": "gelu", "scale_attn_weights": False,
    }),
    "llama classifier": ("Llama", "LlamaForSequenceClassification", SIZES | {
        "num_labels": 7, "pad_token_id": 3,
    }),
    "qwen2 classifier": ("Qwen2", "Qwen2ForSequenceClassification", SIZES | {
        "num_labels": 3, "pad_token_id": 3, "tie_word_embeddings": True,
    }),
    "qwen3 classifier of one label": ("Qwen3", "Qwen3ForSequenceClassification", SIZES | {
        "num_labels": 1, "pad_token_id": 3, "head_dim": 24, "initializer_range": 0.3,
    }),
    "llama": ("Llama", "LlamaForCausalLM", SIZES),
    "llama, tied, with biases": ("Llama", "LlamaForCausalLM", SIZES | {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
    }),
    "llama, scaled as llama3": (
        "Llama", "LlamaForCausalLM", SIZES | {"rope_parameters": LLAMA3},
    ),
    "llama, scaled linearly": ("Llama", "LlamaForCausalLM", SIZES | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    }),
    "llama, scaled by yarn": ("Llama", "LlamaForCausalLM", SIZES | {"rope_parameters": YARN}),
    "llama, scaled dynamically": ("Llama", "LlamaForCausalLM", SIZES | {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": 256,
    }),
    "llama, scaled by longrope": (
        "Llama", "LlamaForCausalLM", SIZES | {"rope_parameters": LONGROPE},
    ),
    "mistral": ("Mistral", "MistralForCausalLM", SIZES | {"sliding_window": 100}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", SIZES | {"num_key_value_heads": 1}),
    "qwen2, windowed": ("Qwen2", "Qwen2ForCausalLM", SIZES | {
        "use_sliding_window": True, "sliding_window": 77, "max_window_layers": 0,
    }),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 32}),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", SIZES | GEMMA | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", SIZES | GEMMA | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        },
    }),
    "gemma3, tied": ("Gemma3Text", "Gemma3ForCausalLM", SIZES | GEMMA | {
        "num_hidden_layers": 6, "tie_word_embeddings": True,
    }),
    "gemma": ("Gemma", "GemmaForCausalLM", SIZES | {"head_dim": 24, "pad_token_id": None}),
    "phi3": ("Phi3", "Phi3ForCausalLM", SIZES | PHI3 | {"sliding_window": 100}),
    "phi3, rotated in part": ("Phi3", "Phi3ForCausalLM", SIZES | PHI3 | {
        "tie_word_embeddings": True, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256, "rope_parameters": LONGROPE | {
            "partial_rotary_factor": 0.75, "short_factor": [1.0 + i / 8 for i in range(6)],
            "long_factor": [1.0 + i for i in range(6)],
        },
    }),
    "granite": ("Granite", "GraniteForCausalLM", SIZES | MULTIPLIERS),
    "granite, tied, with biases": ("Granite", "GraniteForCausalLM", SIZES | MULTIPLIERS | {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    }),
    "smollm3": ("SmolLM3", "SmolLM3ForCausalLM", SIZES | SMOLLM3),
    "smollm3, windowed": ("SmolLM3", "SmolLM3ForCausalLM", SIZES | SMOLLM3 | {
        "use_sliding_window": True, "sliding_window": 77, "no_rope_layers": [0, 1, 1, 0],
        "attention_bias": True,
    }),
    "ministral": ("Ministral", "MinistralForCausalLM", SIZES | {
        "sliding_window": 100, "head_dim": 16,
    }),
    "ministral, interleaved": ("Ministral", "MinistralForCausalLM", SIZES | {
        "sliding_window": 100, "head_dim": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "ministral3": ("Ministral3", "Ministral3ForCausalLM", SIZES | {
        "head_dim": 16, "initializer_range": 0.1, "pad_token_id": None,
        "rope_parameters": YARN | {
            "original_max_position_embeddings": 100, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }),
    "olmo2": ("Olmo2", "Olmo2ForCausalLM", SIZES | {"pad_token_id": None}),
    "glm": ("Glm", "GlmForCausalLM", SIZES | GLM),
    "glm4": ("Glm4", "Glm4ForCausalLM", SIZES | GLM | {"attention_bias": False}),
    "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", {
        name: SIZES[name] for name in SIZES if name != "num_key_value_heads"
    } | {"rotary_pct": 0.5}),
    "gpt_neox, one branch after the other": ("GPTNeoX", "GPTNeoXForCausalLM", {
        name: SIZES[name] for name in SIZES if name != "num_key_value_heads"
    } | {"use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False}),
    "falcon": ("Falcon", "FalconForCausalLM", FALCON | {
        "new_decoder_architecture": True, "num_attention_heads": 6, "num_kv_heads": 2,
        "hidden_size": 96, "bias": True, "ffn_hidden_size": 80, "tie_word_embeddings": False,
    }),
    "falcon, one norm": ("Falcon", "FalconForCausalLM", FALCON | {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
        "rope_parameters": LLAMA3,
    }),
    "falcon, one key head": ("Falcon", "FalconForCausalLM", FALCON | {"bias": True}),
    "falcon, alibi": ("Falcon", "FalconForCausalLM", FALCON | {
        "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True,
        "num_attention_heads": 6, "hidden_size": 96, "attn_implementation": "sdpa",
    }),
    "falcon, alibi, one key head": ("Falcon", "FalconForCausalLM", FALCON | {
        "alibi": True, "attn_implementation": "sdpa",
    }),
    "qwen2, windowed in part": ("Qwen2", "Qwen2ForCausalLM", SIZES | {
        "use_sliding_window": True, "sliding_window": 77, "max_window_layers": 2,
    }),
    "cohere": ("Cohere", "CohereForCausalLM", SIZES | COHERE | {"use_qk_norm": True}),
    "cohere, with biases": ("Cohere", "CohereForCausalLM", SIZES | COHERE | {
        "attention_bias": True, "tie_word_embeddings": False,
    }),
    "cohere2": ("Cohere2", "Cohere2ForCausalLM", SIZES | COHERE | {
        "num_hidden_layers": 5, "sliding_window": 100,
    }),
    "starcoder2": ("Starcoder2", "Starcoder2ForCausalLM", SIZES | {
        "sliding_window": 100, "num_key_value_heads": 1,
    }),
    "starcoder2, without biases": ("Starcoder2", "Starcoder2ForCausalLM", SIZES | {
        "use_bias": False, "tie_word_embeddings": False,
    }),
    "exaone4": ("Exaone4", "Exaone4ForCausalLM", SIZES | {
        "num_hidden_layers": 5, "sliding_window": 100,
    }),
    "exaone4, without a window": ("Exaone4", "Exaone4ForCausalLM", SIZES | {
        "sliding_window": None, "layer_types": ["full_attention"] * 3,
        "rope_parameters": LLAMA3,
    }),
    "seed_oss": ("SeedOss", "SeedOssForCausalLM", SIZES | {
        "head_dim": 24, "pad_token_id": None,
    }),
    "seed_oss, with other biases": ("SeedOss", "SeedOssForCausalLM", SIZES | {
        "head_dim": 24, "pad_token_id": None, "attention_bias": False, "attention_out_bias": True,
        "mlp_bias": True,
    }),
    "arcee": ("Arcee", "ArceeForCausalLM", SIZES | {"rope_parameters": YARN}),
    "arcee, with biases": ("Arcee", "ArceeForCausalLM", SIZES | {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    }),
    "olmo3": ("Olmo3", "Olmo3ForCausalLM", SIZES | {
        "num_hidden_layers": 5, "pad_token_id": None, "sliding_window": 100,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": YARN,
        },
    }),
    "mixtral": ("Mixtral", "MixtralForCausalLM", SIZES | {
        "num_local_experts": 4, "sliding_window": 100,
    }),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeForCausalLM", SIZES | {
        "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }),
    "qwen3_moe, windowed, with biases": ("Qwen3Moe", "Qwen3MoeForCausalLM", SIZES | {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 77,
        "tie_word_embeddings": True,
    }),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3ForCausalLM", LATENT | {
        "q_lora_rank": 24, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    }),
    "deepseek_v3, without shared experts": ("DeepseekV3", "DeepseekV3ForCausalLM", LATENT | {
        "q_lora_rank": 24, "attention_bias": True, "n_shared_experts": 0,
    }),
    "deepseek_v2": ("DeepseekV2", "DeepseekV2ForCausalLM", LATENT | {
        "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy",
        "attention_bias": True,
    }),
    "gpt_oss": ("GptOss", "GptOssForCausalLM", SIZES | {
        "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 100,
        "pad_token_id": None, "rope_parameters": YARN | {"truncate": False},
    }),
    "bert": ("Bert", "BertForMaskedLM", BERT),
    "bert classifier": ("Bert", "BertForSequenceClassification", BERT | {"num_labels": 7}),
    "modernbert": ("ModernBert", "ModernBertForMaskedLM", MODERNBERT),
    "modernbert, with biases": ("ModernBert", "ModernBertForMaskedLM", MODERNBERT | {
        "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
        "decoder_bias": False, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    }),
    "modernbert classifier": ("ModernBert", "ModernBertForSequenceClassification", MODERNBERT | {
        "num_labels": 7,
    }),
    "modernbert classifier of means": (
        "ModernBert", "ModernBertForSequenceClassification",
        MODERNBERT | {"num_labels": 7, "classifier_pooling": "mean"},
    ),
    "t5": ("T5", "T5ForConditionalGeneration", T5),
    "t5, gated, untied": ("T5", "T5ForConditionalGeneration", T5 | {
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "relative_attention_num_buckets": 16, "relative_attention_max_distance": 200,
    }),
    "vit": ("ViT", "ViTForImageClassification", {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "image_size": 32, "patch_size": 8, "num_labels": 7,
        "initializer_range": 0.15,
    }),
}  # fmt: skip
for kind in sorted(DECODERS.keys() - {"llama", "qwen2", "qwen3"}):  # these are above
    configuration, _, fields = CASES[{"gemma3_text": "gemma3, tied"}.get(kind, kind)]
    CASES[f"{kind} classifier"] = (
        configuration,
        DECODERS[kind] + "ForSequenceClassification",
        fields | {"num_labels": 3, "pad_token_id": 3},
    )
BY_DEFAULT = ("gpt2", "qwen3", "olmo2", "glm4")
cases = pytest.mark.parametrize(
    "case",
    [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)


@pytest.fixture(scope="module")
def folder_of(references, tmp_path_factory):
    """The folder of their model of a case, with random weights."""
    made = {}

    def of(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("folder")
            references.call("families.save", case=CASES[case], folder=made[case])
        return made[case]

    return of


def inputs(case, batch=2, seq=SEQ):
    """(arguments of their model, a batch of ours, the argument of our model)."""
    rng = np.random.default_rng(0)
    if case == "vit":
        images = rng.normal(size=(batch, 32, 32, 3)).astype(np.float32)
        labels = rng.integers(0, 7, batch)
        theirs = {"pixel_values": images.transpose(0, 3, 1, 2), "labels": labels}
        return theirs, {"images": images, "labels": labels}, images
    tokens = rng.integers(0, VOCAB, (batch, seq))
    theirs = {"input_ids": tokens, "labels": tokens}
    if case.startswith("t5"):
        mask = (np.arange(seq) < [[seq], [seq // 3]][:batch]).astype(int)
        targets = rng.integers(0, VOCAB, (batch, seq // 2))
        targets[:, -5:] = -100
        read = np.concatenate([np.zeros((batch, 1), int), np.maximum(targets, 0)[:, :-1]], axis=1)
        theirs = {"input_ids": tokens, "attention_mask": mask, "labels": targets}
        pair = {"inputs": tokens, "mask": mask}
        return theirs, {**pair, "targets": targets}, {**pair, "tokens": read}
    if "bert" in case:
        has_types = case.startswith("bert")
        context = {"token_types": rng.integers(0, 2, (batch, seq))} if has_types else {}
        labels = np.where(rng.random((batch, seq)) < 0.15, tokens, -100)
        if "classifier" in case:  # their logits of padding are of what is not padding
            context["mask"] = (np.arange(seq) < [[seq], [seq // 3]][:batch]).astype(int)
            labels = np.arange(batch)
        theirs = {"input_ids": tokens, "labels": labels} | {
            {"token_types": "token_type_ids", "mask": "attention_mask"}[name]: value
            for name, value in context.items()
        }
        x = {"tokens": tokens, **context}
        return theirs, {**x, "labels": labels}, x
    if "classifier" in case:
        tokens = np.maximum(tokens, 4)
        for row, end in zip(tokens, (seq // 3, seq - 5)):
            row[end:] = 3  # padding, of whose embedding torch has no gradient
        theirs["input_ids"] = tokens
        labels = np.arange(batch)
        if "one label" in case:
            labels = rng.normal(size=batch).astype(np.float32)
        theirs["labels"] = labels
        return theirs, {"tokens": tokens, "labels": labels}, tokens
    # As long as theirs: a dynamic scaling depends on the length.
    targets = np.concatenate([tokens[:, 1:], np.full((batch, 1), -100)], axis=1)
    return theirs, {"tokens": tokens, "targets": targets}, tokens


def read(pretrained):
    """(the adapted model, its parameters)."""
    model = adapt_model(pretrained, pretrained.loss)
    shapes = {leaf.path: leaf.shape for leaf in model.leaves}
    shapes |= {path: model.variables[path].shape for path in pretrained.weights.variables}
    pretrained.weights.check(shapes)
    index = {path: tuple(slice(0, n) for n in shape) for path, shape in shapes.items()}
    return model, {path: pretrained.weights.read(path, index[path], np.float32) for path in shapes}


def bound_model(model, params):
    own = {leaf.path for leaf in model.leaves}
    given = {path: x for path, x in params.items() if path not in own}
    params = {path: x for path, x in params.items() if path in own}
    return model.bind(params, model.init(0)[1] | given, train=False, step=0, micro=0)


def called(model, x):
    x = jax.tree.map(jnp.asarray, x)
    return model(**x) if isinstance(x, dict) else model(x)


@pytest.mark.default_cases("olmo2")
@cases
def test_logits_loss_and_gradients_are_theirs(references, folder_of, case, tmp_path):
    pretrained = from_pretrained(folder_of(case))
    model, params = read(pretrained)
    arguments, batch, x = inputs(case)
    theirs = references.call(
        "families.logits_loss_and_gradients",
        case=CASES[case],
        arguments=arguments,
        folder=tmp_path,
    )

    def loss(params):
        bound = bound_model(model, params)
        total, weight, *_ = pretrained.loss(bound, jax.tree.map(jnp.asarray, batch))
        return total / weight, called(bound, x)

    (mine, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.abs(theirs["logits"]).max() > (0.5 if "classifier" in case else 1)
    np.testing.assert_allclose(logits, theirs["logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(mine, theirs["loss"], atol=1e-4, rtol=0)
    file = TensorFile.open(tmp_path / "model.safetensors")
    for path in pretrained.weights.variables:
        assert not np.asarray(grads.pop(path)).any()
    names = theirs_by_name(pretrained, grads)
    # A module of size 0 has tensors without elements.
    assert names.keys() == {name for name in file.tensors if file.array(name).size}
    for name, found in names.items():
        np.testing.assert_allclose(found, file.array(name), atol=1e-4, rtol=0, err_msg=name)


def theirs_by_name(pretrained, values):
    """Arrays of the parameters' shapes as tensors of theirs."""
    bound = bind(pretrained.weights.table, {path: x.shape for path, x in values.items()})
    made = {name: np.full(shape, np.nan, np.float32) for name, shape in bound.tensors.items()}
    for path, x in values.items():
        for piece in bound.pieces[path]:
            whole = tuple(slice(0, n) for n in x.shape)
            piece.write(made[piece.tensor], whole, np.asarray(x))
    return made


@pytest.mark.default_cases("glm4")
@cases
def test_greedy_tokens_are_theirs(references, folder_of, case):
    """Prompts that differ in length, and texts beyond the windows of 77 and 100 tokens."""
    if case.startswith("vit") or "bert" in case or "classifier" in case:
        pytest.skip("it generates no text")
    folder = folder_of(case)
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "mesh": {"tensor": 2}}
    if CASES[case][2].get("num_key_value_heads") == 1:
        del config["mesh"]
    engine = jaxspeed.initialize(config=config | {"model": {"pretrained": str(folder)}})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (90, 7)]
    # With random weights and a tied head, some repeat one token.
    repeats = "gemma" in case or case.startswith(
        (
            "granite, tied",
            "cohere",
            "falcon",
            "gpt2, gelu",
            "qwen3_moe, windowed",
            "starcoder",
            "t5",
        )
    )
    rules = {"repetition_penalty": 1e3} if repeats else {}
    found = engine.generate(prompts, 40, temperature=0, **rules)
    theirs = references.call(
        "families.greedy_tokens", case=CASES[case], prompts=prompts, count=40, rules=rules
    )
    assert [list(mine.tokens) for mine in found] == theirs
    assert len({token for mine in found for token in mine.tokens}) > 6


@pytest.mark.default_cases("gpt2", "qwen3", "olmo2")
@cases
def test_tensors_come_back_bitwise(references, folder_of, case, tmp_path):
    folder = folder_of(case)

    def differences(folder):
        arguments = inputs(case)[0]
        return references.call(
            "families.differences", case=CASES[case], folder=folder, arguments=arguments
        )

    rest = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    rest["zero_optimization"] = {"stage": 3}
    engine = jaxspeed.initialize(config=rest | {"model": {"pretrained": str(folder)}})
    engine.save_pretrained(tmp_path / "out")
    assert differences(tmp_path / "out") == []
    # And with a config.json of our own.
    program, state = engine.program, engine.state
    family = {"family": type(program.source.model.config).__module__.rpartition(".")[2]}
    family["config"] = dataclasses.asdict(program.source.model.config)
    if scaling := family["config"].get("rope_scaling"):
        kind = type(program.source.model.config.rope_scaling).rope_type
        family["config"]["rope_scaling"] = scaling | {"rope_type": kind}
    other = jaxspeed.Config(**rest, model=family)
    built = build_program(other, *jaxspeed.user_models.config_model.resolve_model(other))
    save_pretrained(built, state, tmp_path / "again")
    assert differences(tmp_path / "again") == []


@pytest.mark.default_cases("model.language_model.")
@pytest.mark.parametrize("spelled", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_with_images_is_read_and_exported(
    references, tmp_path, caplog, spelled
):
    images = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**CASES["gemma3"][2], "tie_word_embeddings": True}
    fields = {
        "text_config": text, "vision_config": images, "mm_tokens_per_image": 4,
        "image_token_index": 198,
    }  # fmt: skip
    references.call("families.save_with_images", fields=fields, folder=tmp_path / "in")
    (tmp_path / "in" / "preprocessor_config.json").write_text("{}")
    (file,) = (tmp_path / "in").glob("*.safetensors")
    tensors = load_file(file)
    assert {name.split(".")[0] for name in tensors} == {
        "language_model", "vision_tower", "multi_modal_projector",
    }  # fmt: skip
    named = {n.replace("language_model.model.", spelled): x for n, x in tensors.items()}
    save_file(named, file, {"format": "pt"})
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD"}}
    named = {"pretrained": str(tmp_path / "in"), "text_only": True}
    engine = jaxspeed.initialize(config=config | {"model": named})
    count = sum(not name.startswith("language_model.") for name in tensors) - 2
    assert f"not: multi_modal_projector.* (2), vision_tower.* ({count})" in caplog.text
    engine.save_pretrained(tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    tokens = np.random.default_rng(0).integers(0, 190, (2, SEQ))
    theirs = references.call(
        "families.language_model_of", fields=fields, folder=tmp_path / "out", tokens=tokens
    )
    assert (theirs["class"], theirs["differences"]) == ("Gemma3ForCausalLM", [])
    model, params = read(from_pretrained(tmp_path / "in", text_only=True))
    mine = jax.jit(lambda params: bound_model(model, params)(jnp.asarray(tokens)))(params)
    np.testing.assert_allclose(mine, theirs["logits"], atol=1e-4, rtol=0)


def test_fields_that_a_published_text_config_lacks_are_their_defaults(references, tmp_path):
    text = {  # of Gemma 3 4B
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    outer = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = from_pretrained(tmp_path, text_only=True).config
    references.call(
        "families.save_config", configuration="Gemma3Text", fields=text, folder=tmp_path
    )
    assert found == from_pretrained(tmp_path).config
    assert (found.rope_scaling.factor, found.vocab_size) == (8.0, 262208)


def test_a_bert_of_the_first_release_is_read(folder_of, tmp_path):
    """Norms with other names, and the pooler and head of the next sentence's prediction."""
    folder = folder_of("bert")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForPreTraining"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, x in load_file(folder / "model.safetensors").items():
        *start, module, last = name.split(".")
        last = names.get(f"{module}.{last}", f"{module}.{last}")
        old[".".join([*start, last])] = x
    for name in ("bert.pooler.dense", "cls.seq_relationship"):
        old |= {f"{name}.weight": np.ones((2, 64)), f"{name}.bias": np.ones(2)}
    save_file(old, tmp_path / "model.safetensors")
    (_, found), (_, expected) = read(from_pretrained(tmp_path)), read(from_pretrained(folder))
    assert found.keys() == expected.keys()
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)


def mutations(table):
    """(description, table with one rule changed) for each rule and each change that it allows."""
    for i, rule in enumerate(table.rules):

        def changed(what, *, at=i, rule=rule, **fields):
            rules = list(table.rules)
            rules[at] = dataclasses.replace(rule, **fields)
            return f"{rule.tensor}: {what}", dataclasses.replace(table, rules=rules)

        rest = [each for each in table.rules if each is not rule]
        yield f"{rule.tensor}: dropped", dataclasses.replace(table, rules=rest)
        yield changed("renamed", tensor=f"{rule.tensor}s")
        left, arrow, right = rule.layout.partition(" -> ")
        if "(" in left:
            begin, end = left.index("("), left.index(")")
            factors = left[begin + 1 : end].split()
            for order in itertools.permutations(factors):
                if list(order) != factors:
                    layout = f"{left[:begin]}({' '.join(order)}){left[end + 1 :]}{arrow}{right}"
                    yield changed(f"({' '.join(order)})", layout=layout)
        elif len(left.split()) == 2:
            yield changed("transposed", layout=f"{' '.join(reversed(left.split()))}{arrow}{right}")
        if isinstance(rule.paths, tuple):
            for order in itertools.permutations(rule.paths):
                if order != rule.paths:
                    yield changed(f"order {order}", paths=order)
        for j, other in enumerate(table.rules[:i]):
            if other.layout == rule.layout and isinstance(rule.paths, str):
                rules = list(table.rules)
                rules[i] = dataclasses.replace(rule, paths=other.paths)
                rules[j] = dataclasses.replace(other, paths=rule.paths)
                what = f"{rule.tensor}: exchanged with {other.tensor}"
                yield what, dataclasses.replace(table, rules=rules)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case",
    ["gpt2", *(pytest.param(c, marks=pytest.mark.full) for c in CASES if c != "gpt2")],
)
def test_a_mutation_of_any_rule_is_an_error_or_changes_the_logits(references, folder_of, case):
    pretrained = from_pretrained(folder_of(case))
    model, params = read(pretrained)
    used = {
        piece.tensor for pieces in pretrained.weights._bound.pieces.values() for piece in pieces
    }
    active = {numberless(name) for name in used}
    arguments, _, x = inputs(case, batch=1, seq=64)
    expected = references.call("families.logits", case=CASES[case], arguments=arguments)
    logits = jax.jit(lambda params: called(bound_model(model, params), x))
    np.testing.assert_allclose(logits(params), expected, atol=1e-4, rtol=0)
    # What logits do not show is compared by value: without a rotation, a key's bias changes no
    # softmax, and the sum of parallel branches does not show which of them has a bias.
    outputs = dict.fromkeys(("gpt_neox", "falcon", "falcon, one key head"), "o_proj")
    unseen = outputs.get(case, "k_proj" if case.startswith(("vit", "bert")) else None)
    if unseen:
        unseen = f"blocks/attn/{unseen}/bias"
        biases = np.stack(references.call("families.unseen_biases", case=CASES[case]))
        np.testing.assert_array_equal(params[unseen].reshape(biases.shape), biases)
    caught = 0
    one_key_head = getattr(pretrained.config, "num_key_value_heads", None) == 1
    for what, table in mutations(pretrained.weights.table):
        if one_key_head and re.search(r"\.[kv]_proj\.\w+: \(dim heads\)", what):
            continue  # the same layout
        try:
            weights = type(pretrained.weights)(pretrained.weights.folder, table)
            _, changed = read(dataclasses.replace(pretrained, weights=weights))
        except jaxspeed.PretrainedError:
            caught += 1
            continue
        found = np.abs(logits(changed) - expected).max()
        if unseen and (changed[unseen] != params[unseen]).any():
            found = 1.0
        inactive = numberless(what.split(":")[0]) not in active
        assert found > 1e-3 or inactive, what
        caught += not inactive
    in_layers = {re.sub(r"experts\.\d+", "experts", name) for name in used}
    assert caught >= 2 * len(in_layers) / 4


def numberless(name):
    """A tensor's name, or a rule's, without numbers."""
    return re.sub(r"\{\w+\}|(?<=\.)\d+(?=\.)", "#", name)


SCALED = {
    "llama3": "as llama3", "linear": "linearly", "yarn": "by yarn", "dynamic": "dynamically",
    "longrope": "by longrope",
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_both_spellings_of_rotary_settings_are_read(folder_of, tmp_path, kind):
    folder = folder_of(f"llama, scaled {SCALED[kind]}")
    config = json.loads((folder / "config.json").read_text())
    new = from_pretrained(folder).config
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    for spelled in ("rope_type", "type"):
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_type"}
        config["rope_scaling"][spelled] = kind
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert from_pretrained(tmp_path).config == new


def test_mxfp4_is_dequantized_as_theirs(references, tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 24, 2, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (3, 24, 2), dtype=np.uint8)
    folders.write(tmp_path / "model.safetensors", {"w_blocks": blocks, "w_scales": scales})
    folder = PretrainedFolder(tmp_path)
    expected = references.call("families.mxfp4", blocks=blocks, scales=scales)
    assert folder.tensors["w"].shape == expected.shape == (3, 64, 24)
    np.testing.assert_array_equal(folder.array("w"), expected)


@pytest.mark.full
def test_the_readmes_walk_ends_in_transformers(references, tmp_path):
    """Make a folder, continue its training, generate, export, load it."""
    theirs = references.interpreter("torch", "transformers")
    section = (ROOT / "README.md").read_text().partition("## Hugging Face folders\n")[2]
    made, config, commands, loaded = (block.text for block in blocks(section)[:4])
    (tmp_path / "config.yaml").write_text(config)
    checked = f"{loaded}\nprint(model.dtype, model.lm_head.weight.shape)"
    printed = []
    for command in (
        [theirs, "-c", made],
        *([sys.executable, "-m", *shlex.split(each)] for each in shell_commands(commands)),
        [theirs, "-c", checked],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        printed.append(done.stdout)
    _, _, text, _, checks = printed
    assert "def " in text
    assert "torch.bfloat16 torch.Size([256, 64])" in checks
