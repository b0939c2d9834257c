"""GPT-2 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .classification_hf import read_head, write_head
from .decoder_hf import with_head
from .gpt2 import Config

MODEL_TYPES = {"gpt2": "GPT2LMHeadModel"}

FIELDS = (
    Field("n_embd", "hidden_size"),
    Field("n_layer", "num_hidden_layers"),
    Field("n_head", "num_attention_heads"),
    Field("n_inner", "intermediate_size", int, None),
    Field("vocab_size", "vocab_size"),
    Field("n_positions", "max_position_embeddings"),
    Field("layer_norm_epsilon", "layer_norm_epsilon", float, 1e-5),
    Field("initializer_range", "initializer_range", float, 0.02),
    Field("tie_word_embeddings", "tie_word_embeddings", bool, True),
    Field("activation_function", "activation_function", str, "gelu_new"),
    Field("scale_attn_weights", "scale_attn_weights", bool, True),
    Field("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", bool, False),
    Field("reorder_and_upcast_attn", "reorder_and_upcast_attn", bool, False),
    Fixed("add_cross_attention", (False,)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_fields(values, FIELDS), **read_head(values))


def write_config(config: Config) -> dict[str, Any]:
    if config.num_key_value_heads not in (None, config.num_attention_heads):
        raise ValueError("Hugging Face's GPT-2 has as many key heads as query heads")
    return {"model_type": "gpt2", **write_fields(config, FIELDS), **write_head("gpt2", config)}


def table(config: Config) -> MappingTable:
    """Its linear layers have the input dim first, and queries, keys and values in one."""
    block, ours = "transformer.h.{layer}", "blocks"
    qkv = ("q_proj", "k_proj", "v_proj")
    made = MappingTable(
        [
            TensorRule("transformer.wte.weight", "embed/table", kind="embedding"),
            TensorRule("transformer.wpe.weight", "positions/table", kind="embedding"),
            TensorRule(f"{block}.ln_1.weight", f"{ours}/attn_norm/scale"),
            TensorRule(f"{block}.ln_1.bias", f"{ours}/attn_norm/bias"),
            TensorRule(
                f"{block}.attn.c_attn.weight",
                tuple(f"{ours}/attn/{name}/kernel" for name in qkv),
                "embed (part heads dim) -> layer embed heads dim",
                kind="conv1d",
            ),
            TensorRule(
                f"{block}.attn.c_attn.bias",
                tuple(f"{ours}/attn/{name}/bias" for name in qkv),
                "(part heads dim) -> layer heads dim",
            ),
            TensorRule(
                f"{block}.attn.c_proj.weight",
                f"{ours}/attn/o_proj/kernel",
                "(heads dim) embed -> layer heads dim embed",
                kind="conv1d",
            ),
            TensorRule(f"{block}.attn.c_proj.bias", f"{ours}/attn/o_proj/bias"),
            TensorRule(f"{block}.ln_2.weight", f"{ours}/mlp_norm/scale"),
            TensorRule(f"{block}.ln_2.bias", f"{ours}/mlp_norm/bias"),
            TensorRule(f"{block}.mlp.c_fc.weight", f"{ours}/mlp/up/kernel", kind="conv1d"),
            TensorRule(f"{block}.mlp.c_fc.bias", f"{ours}/mlp/up/bias"),
            TensorRule(f"{block}.mlp.c_proj.weight", f"{ours}/mlp/down/kernel", kind="conv1d"),
            TensorRule(f"{block}.mlp.c_proj.bias", f"{ours}/mlp/down/bias"),
            TensorRule("transformer.ln_f.weight", "norm/scale"),
            TensorRule("transformer.ln_f.bias", "norm/bias"),
        ],
        # The causal mask, which old versions stored.
        ignored=[f"{block}.attn.bias", f"{block}.attn.masked_bias"],
        prefix="transformer.",
    )
    return with_head(made, config, "lm_head.weight", "transformer.wte.weight")
