"""Phi-3 and Phi-4 in Hugging Face's format: queries, keys and values are one tensor there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import (
    ATTENTION,
    BLOCK,
    FUSED_GATED,
    NORMS_BEFORE,
    OURS,
    QKV,
    decoder_table,
    read_sizes,
    size_fields,
    write_sizes,
)
from .phi3 import Config

MODEL_TYPES = {"phi3": "Phi3ForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-5, tie_word_embeddings=False),
    Field("sliding_window", "sliding_window", int, None),
    Fixed("hidden_act", ("silu",)),
    Fixed("attention_bias", (False,)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("type") in ("su", "yarn"):
        # Older files name LongRoPE so.
        values = {**values, "rope_scaling": {**scaling, "type": "longrope"}}
    return Config(**read_sizes(values, FIELDS, 10000.0, partial=1.0))


def write_config(config: Config) -> dict[str, Any]:
    original = getattr(config.rope_scaling, "original_max_position_embeddings", None)
    scaled = {"original_max_position_embeddings": original} if original else {}
    return {**write_sizes("phi3", config, FIELDS), **scaled}


def table(config: Config) -> MappingTable:
    fused = TensorRule(
        f"{BLOCK}.self_attn.qkv_proj.weight",
        tuple(f"{OURS}/attn/{name}/kernel" for name in QKV),
        "(part heads dim) embed -> layer embed heads dim",
    )
    output = [rule for rule in ATTENTION if "o_proj" in rule.tensor]
    return decoder_table(config, NORMS_BEFORE, [fused, *output, *FUSED_GATED])
