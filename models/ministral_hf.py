"""Ministral in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    GATED,
    GLOBAL,
    LOCAL,
    NORMS_BEFORE,
    decoder_table,
    read_layers,
    read_rope,
    size_fields,
    write_rope,
    write_sizes,
)
from .ministral import Config

MODEL_TYPES = {"ministral": "MinistralForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=8, rms_norm_eps=1e-6, tie_word_embeddings=False),
    Field("sliding_window", "sliding_window", int, 4096),
    Read("layer_types"),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_fields(values, FIELDS)
    layers = found["num_hidden_layers"]
    found["rope_theta"], found["rope_scaling"] = read_rope(values, 10000.0)
    kinds = read_layers(values, layers) or [LOCAL] * layers
    found["global_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == GLOBAL)
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    return {
        "model_type": "ministral",
        **write_sizes(config, FIELDS),
        **write_rope(config),
        "layer_types": [GLOBAL if each else LOCAL for each in config.is_global],
    }


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
