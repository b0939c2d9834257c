"""GPT-NeoX and Pythia in Hugging Face's format: a head's query, key and value follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import (
    Field,
    Fields,
    Fixed,
    Read,
    read_fields,
    write_fields,
)
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import QKV, read_partial, read_scaling, write_rope
from .gpt_neox import Config

MODEL_TYPES = {"gpt_neox": "GPTNeoXForCausalLM"}
FIELDS: Fields = (
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_hidden_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "intermediate_size"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("layer_norm_eps", "rms_norm_eps", float, 1e-5),
    Field("initializer_range", "initializer_range", float, 0.02),
    Field("tie_word_embeddings", "tie_word_embeddings", bool, False),
    Field("attention_bias", "attention_bias", bool, True),
    *map(Read, ("rotary_emb_base", "rotary_pct", "rope_scaling", "rope_parameters", "rope_theta")),
    *map(Read, ("partial_rotary_factor", "original_max_position_embeddings")),
    Fixed("hidden_act", ("gelu",)),
    Fixed("use_parallel_residual", (True,)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_fields(values, FIELDS)
    found["num_key_value_heads"] = found["num_attention_heads"]
    found["partial_rotary_factor"] = read_partial(values, values.get("rotary_pct", 0.25))
    base = values.get("rotary_emb_base", 10000.0)
    found["rope_theta"], found["rope_scaling"] = read_scaling(values, base)
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    if config.num_key_value_heads != config.num_attention_heads or (
        config.size_of_head * config.num_attention_heads != config.hidden_size
    ):
        raise ValueError(
            "Hugging Face's gpt_neox has hidden_size / num_attention_heads dims a head"
        )
    older = {"rotary_emb_base": config.rope_theta, "rotary_pct": config.partial_rotary_factor}
    return {"model_type": "gpt_neox", **write_fields(config, FIELDS), **write_rope(config), **older}


def table(config: Config) -> MappingTable:
    block, ours = "gpt_neox.layers.{layer}", "blocks"
    names = {
        f"{block}.input_layernorm": (f"{ours}/attn_norm/scale", ""),
        f"{block}.post_attention_layernorm": (f"{ours}/mlp_norm/scale", ""),
        f"{block}.attention.dense": (
            f"{ours}/attn/o_proj/kernel",
            "embed (heads dim) -> layer heads dim embed",
        ),
        f"{block}.mlp.dense_h_to_4h": (f"{ours}/mlp/up/kernel", "out in -> layer in out"),
        f"{block}.mlp.dense_4h_to_h": (f"{ours}/mlp/down/kernel", "out in -> layer in out"),
        "gpt_neox.final_layer_norm": ("norm/scale", ""),
    }
    fused = f"{block}.attention.query_key_value"
    rules = [
        TensorRule("gpt_neox.embed_in.weight", "embed/table"),
        TensorRule("embed_out.weight", "head/table"),
        TensorRule(
            f"{fused}.weight",
            tuple(f"{ours}/attn/{name}/kernel" for name in QKV),
            "(heads part dim) embed -> layer embed heads dim",
        ),
        TensorRule(
            f"{fused}.bias",
            tuple(f"{ours}/attn/{name}/bias" for name in QKV),
            "(heads part dim) -> layer heads dim",
        ),
    ]
    for theirs, (path, layout) in names.items():
        bias = f"{path.rpartition('/')[0]}/bias"
        rules += [
            TensorRule(f"{theirs}.weight", path, layout),
            TensorRule(f"{theirs}.bias", bias),
        ]
    # The causal mask and rotary buffers, which old versions stored; a tied head stored twice.
    buffers = ("bias", "masked_bias", "rotary_emb.inv_freq")
    return MappingTable(
        rules,
        ignored=[
            *(f"{block}.attention.{name}" for name in buffers),
            *(["embed_out.weight"] if config.tie_word_embeddings else []),
        ],
        prefix="gpt_neox.",
    )
