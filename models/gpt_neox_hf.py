"""GPT-NeoX and Pythia in Hugging Face's format: a head's query, key and value follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import QKV, linear, norm_rules, read_sizes, size_fields, with_head, write_sizes
from .gpt_neox import Config

MODEL_TYPES = {"gpt_neox": "GPTNeoXForCausalLM"}
FIELDS = (
    *size_fields(
        "layer_norm_eps", num_key_value_heads=None, rms_norm_eps=1e-5, tie_word_embeddings=False
    ),
    Field("attention_bias", "attention_bias", bool, True),
    Read("rotary_emb_base"),
    Read("rotary_pct"),
    Fixed("hidden_act", ("gelu",)),
    Field("use_parallel_residual", "parallel_residual", bool, True),
)


def read_config(values: Mapping[str, Any]) -> Config:
    base, part = values.get("rotary_emb_base", 10000.0), values.get("rotary_pct", 0.25)
    return Config(**read_sizes(values, FIELDS, base, partial=part))


def write_config(config: Config) -> dict[str, Any]:
    if config.num_key_value_heads != config.num_attention_heads or (
        config.size_of_head * config.num_attention_heads != config.hidden_size
    ):
        raise ValueError(
            "Hugging Face's gpt_neox has hidden_size / num_attention_heads dims a head"
        )
    older = {"rotary_emb_base": config.rope_theta, "rotary_pct": config.partial_rotary_factor}
    return write_sizes("gpt_neox", config, FIELDS) | older


def table(config: Config) -> MappingTable:
    block, ours = "gpt_neox.layers.{layer}", "blocks"
    fused, flat = f"{block}.attention.query_key_value", "out in -> layer in out"
    # The causal mask and rotary buffers, which old versions stored.
    buffers = ("bias", "masked_bias", "rotary_emb.inv_freq")
    made = MappingTable(
        [
            TensorRule("gpt_neox.embed_in.weight", "embed/table", kind="embedding"),
            *norm_rules("gpt_neox.final_layer_norm", "norm"),
            *norm_rules(f"{block}.input_layernorm", f"{ours}/attn_norm"),
            *norm_rules(f"{block}.post_attention_layernorm", f"{ours}/mlp_norm"),
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
            *linear(
                "attention.dense",
                "attn/o_proj",
                "embed (heads dim) -> layer heads dim embed",
                block=block,
            ),
            *linear("mlp.dense_h_to_4h", "mlp/up", flat, block=block),
            *linear("mlp.dense_4h_to_h", "mlp/down", flat, block=block),
        ],
        ignored=[f"{block}.attention.{name}" for name in buffers],
        prefix="gpt_neox.",
    )
    return with_head(made, config, "embed_out.weight", "gpt_neox.embed_in.weight")
