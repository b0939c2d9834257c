"""Ministral and Ministral 3 (its language model) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
    decoder_table,
    global_layers,
    read_sizes,
    size_fields,
    write_layers,
    write_sizes,
)
from .ministral import Config

MODEL_TYPES = {"ministral": "MinistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {"mistral3": {"model_type": "mistral"}}
GROWTH = "llama_4_scaling_beta"  # of rope_parameters
FIELDS = (
    *size_fields(num_key_value_heads=8, rms_norm_eps=1e-6, tie_word_embeddings=False),
    Field("sliding_window", "sliding_window", int, None),
    Read("layer_types"),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    growth = {}
    if values["model_type"] == "ministral3":
        growth = read_fields(rope, [Field(GROWTH, "query_growth", float)], "rope_parameters")
        rope = {n: x for n, x in rope.items() if n not in (GROWTH, "max_position_embeddings")}
    found = read_sizes({**values, "rope_parameters": rope}, FIELDS, 10000.0) | growth
    if "sliding_window" not in values and not growth:
        found["sliding_window"] = 4096
    found["global_layers"] = global_layers(values, found["num_hidden_layers"], None)
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    if config.query_growth is not None:
        if config.sliding_window is not None and config.global_layers:
            raise ValueError("Hugging Face's ministral3 has one window for all layers")
        written = write_sizes("ministral3", config, FIELDS)
        grown = {GROWTH: config.query_growth}
        both = {name: written[name] | grown for name in ("rope_scaling", "rope_parameters")}
        return written | both
    return {**write_sizes("ministral", config, FIELDS), "layer_types": write_layers(config)}


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
