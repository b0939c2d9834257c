"""Command R (`cohere`) and Command R7B (`cohere2`) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .cohere import Config
from .decoder_hf import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    decoder_table,
    global_layers,
    read_sizes,
    size_fields,
    write_layers,
    write_sizes,
)

MODEL_TYPES = {"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"}
FIELDS = (
    *size_fields(
        "layer_norm_eps", num_key_value_heads=None, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    Field("logit_scale", "logit_scale", float, 0.0625),
    Field("attention_bias", "attention_bias", bool, False),
    *map(Read, ("use_qk_norm", "sliding_window", "sliding_window_pattern", "layer_types")),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    second = values["model_type"] == "cohere2"
    found = read_sizes(values, FIELDS, 10000.0 if second else 500000.0)
    if second:
        found |= read_fields(values, [Field("sliding_window", "sliding_window", int, 4096)])
        period = values.get("sliding_window_pattern", 4)
        found["global_layers"] = global_layers(values, found["num_hidden_layers"], period)
    else:
        found |= read_fields(values, [Field("use_qk_norm", "qk_norm", bool, False)])
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    if config.sliding_window is None:
        written = write_sizes("cohere", config, FIELDS)
        return {**written, "use_qk_norm": config.qk_norm}
    if config.qk_norm:
        raise ValueError("Hugging Face's cohere2 has no norms of queries and keys")
    window = {"sliding_window": config.sliding_window, "layer_types": write_layers(config)}
    return {**write_sizes("cohere2", config, FIELDS), **window}


def table(config: Config) -> MappingTable:
    norms = {"input_layernorm": "attn_norm"}
    return decoder_table(config, norms, [*ATTENTION, *HEAD_NORMS, *GATED])
