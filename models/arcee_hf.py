"""AFM (`arcee`) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed
from jaxspeed.interop.mapping import MappingTable

from .arcee import Config
from .decoder_hf import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
    decoder_table,
    read_sizes,
    size_fields,
    write_sizes,
)

MODEL_TYPES = {"arcee": "ArceeForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-5, tie_word_embeddings=False),
    Field("attention_bias", "attention_bias", bool, False),
    Field("mlp_bias", "mlp_bias", bool, False),
    Fixed("hidden_act", ("relu2",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_sizes(values, FIELDS, 10000.0))


def write_config(config: Config) -> dict[str, Any]:
    return write_sizes("arcee", config, FIELDS)


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
