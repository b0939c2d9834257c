"""Gemma 1 in Hugging Face's format."""

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
from .gemma1 import Config

MODEL_TYPES = {"gemma": "GemmaForCausalLM"}
# Published files have "gelu" where the tanh form is meant.
GELU = ("gelu_pytorch_tanh", "gelu")
FIELDS = (
    *size_fields(head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True),
    Field("attention_bias", "attention_bias", bool, False),
    Fixed("hidden_act", GELU),
    Fixed("hidden_activation", (*GELU, None)),
    Fixed("use_bidirectional_attention", (None, False)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_sizes(values, FIELDS, 10000.0))


def write_config(config: Config) -> dict[str, Any]:
    return write_sizes("gemma", config, FIELDS)


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
