"""GLM-4 (`glm`) and GLM-4-0414 (`glm4`) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    FUSED_GATED,
    NORMS_BEFORE,
    decoder_table,
    read_sizes,
    size_fields,
    write_sizes,
)
from .glm4 import Config

MODEL_TYPES = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"}
FIELDS = (
    *size_fields(
        num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7, tie_word_embeddings=False
    ),
    Field("attention_bias", "attention_bias", bool, True),
    Fixed("hidden_act", ("silu",)),
)
OUTPUT_NORMS = {
    "post_self_attn_layernorm": "attn_out_norm",
    "post_mlp_layernorm": "mlp_out_norm",
}


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_sizes(values, FIELDS, 10000.0, partial=0.5)
    return Config(**found, output_norms=values["model_type"] == "glm4")


def write_config(config: Config) -> dict[str, Any]:
    kind = "glm4" if config.output_norms else "glm"
    return write_sizes(kind, config, FIELDS)


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE | OUTPUT_NORMS, [*ATTENTION, *FUSED_GATED])
