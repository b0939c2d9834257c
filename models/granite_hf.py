"""Granite in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
    decoder_table,
    read_sizes,
    size_fields,
    write_sizes,
)
from .granite import Config

MODEL_TYPES = {"granite": "GraniteForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-6, tie_word_embeddings=False),
    *(
        Field(name, name, float, 1.0)
        for name in (
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
            "logits_scaling",
        )
    ),
    Field("attention_bias", "attention_bias", bool, False),
    Field("mlp_bias", "mlp_bias", bool, False),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_sizes(values, FIELDS, 10000.0))


def write_config(config: Config) -> dict[str, Any]:
    return write_sizes("granite", config, FIELDS)


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
