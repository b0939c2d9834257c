"""Seed-OSS in Hugging Face's format."""

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
from .seed_oss import Config

MODEL_TYPES = {"seed_oss": "SeedOssForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, tie_word_embeddings=False),
    Field("attention_bias", "qkv_bias", bool, True),
    Field("attention_out_bias", "o_bias", bool, False),
    Field("mlp_bias", "mlp_bias", bool, False),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_sizes(values, FIELDS, 10000.0))


def write_config(config: Config) -> dict[str, Any]:
    if config.sliding_window is not None or config.qk_norm:
        raise ValueError("Hugging Face's seed_oss has no sliding window and no norms of heads")
    return write_sizes("seed_oss", config, FIELDS)


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
