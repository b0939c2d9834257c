"""Mixtral and Qwen3-MoE in Hugging Face's format: a tensor for each matrix of each expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    BLOCK,
    HEAD_NORMS,
    NORMS_BEFORE,
    decoder_table,
    read_sizes,
    size_fields,
    write_sizes,
)
from .mixtral import Config
from .mixture_hf import (
    EXPERTS,
    FUSED_EXPERTS,
    expert_rules,
    fused_expert_rules,
    read_balance,
    write_balance,
)

MODEL_TYPES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

_BALANCE = (*map(Read, ("router_aux_loss_coef", "output_router_logits")),)
_MIXTRAL = (
    *size_fields(num_key_value_heads=8, rms_norm_eps=1e-5, tie_word_embeddings=False),
    *_BALANCE,
    Field("num_local_experts", "num_experts", int, 8),
    Field("num_experts_per_tok", "num_experts_per_tok", int, 2),
    Field("sliding_window", "sliding_window", int, None),
    Fixed("hidden_act", ("silu",)),
    Fixed("router_jitter_noise", (0.0, None)),
)
_QWEN3 = (
    *(
        field
        for field in size_fields(
            num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False
        )
        if field.theirs != "intermediate_size"  # of dense layers, of which there are none
    ),
    *_BALANCE,
    *map(Read, ("num_experts", "intermediate_size", "sliding_window", "use_sliding_window")),
    Read("max_window_layers"),
    Field("moe_intermediate_size", "intermediate_size", int, 768),
    Field("num_experts_per_tok", "num_experts_per_tok", int, 8),
    Field("norm_topk_prob", "norm_topk_prob", bool, False),
    Field("attention_bias", "qkv_bias", bool, False),
    Fixed("hidden_act", ("silu",)),
    Fixed("decoder_sparse_step", (1,)),
    Fixed("mlp_only_layers", ([], None)),
)
FIELDS = (*_MIXTRAL, *_QWEN3)


def read_config(values: Mapping[str, Any]) -> Config:
    balance = read_balance(values)
    if values["model_type"] == "mixtral":
        return Config(**read_sizes(values, _MIXTRAL, 1e6), **balance)
    found = read_sizes(values, _QWEN3, 1e4) | balance
    experts = values.get("num_experts") or values.get("num_local_experts") or 128
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    return Config(
        **found, o_bias=found["qkv_bias"], qk_norm=True, num_experts=experts, sliding_window=window
    )


def write_config(config: Config) -> dict[str, Any]:
    c = config
    if c.global_layers:
        raise ValueError(
            "Hugging Face's mixtures with Llama's attention have a window in no layer, or in all"
        )
    if not c.qk_norm:
        if c.qkv_bias or c.o_bias or not c.norm_topk_prob:
            raise ValueError("Hugging Face's mixtral has no biases, and renormalizes weights")
        return {**write_sizes("mixtral", c, _MIXTRAL), **write_balance(c)}
    if c.qkv_bias != c.o_bias:
        raise ValueError("Hugging Face's qwen3_moe has biases in all of attention or in none of it")
    return {
        **write_sizes("qwen3_moe", c, _QWEN3),
        **write_balance(c),
        "num_experts": c.num_experts,
        "intermediate_size": c.intermediate_size,
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
    }


def table(config: Config) -> MappingTable:
    """Their configs have no `routed_scaling_factor`: files have experts' last weights times it."""
    scale = config.routed_scaling_factor
    if config.qk_norm:
        experts = expert_rules(f"{BLOCK}.mlp", EXPERTS, scale=scale)
    else:
        experts = expert_rules(f"{BLOCK}.block_sparse_moe", ("w1", "w3", "w2"), scale=scale)
    made = decoder_table(config, NORMS_BEFORE, [*ATTENTION, *HEAD_NORMS, *experts])
    return replace(made, memory=fused_table(config))


def fused_table(config: Config) -> MappingTable:
    """The table of a folder with the names that transformers 5 has in memory."""
    experts = fused_expert_rules(f"{BLOCK}.mlp", scale=config.routed_scaling_factor)
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *HEAD_NORMS, *experts])


OTHER_TABLES = {FUSED_EXPERTS: fused_table}
