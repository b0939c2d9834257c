"""StarCoder 2 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    NORMS_BEFORE,
    decoder_table,
    linear,
    read_sizes,
    size_fields,
    write_sizes,
)
from .starcoder2 import Config

MODEL_TYPES = {"starcoder2": "Starcoder2ForCausalLM"}
FIELDS = (
    *size_fields(
        "norm_epsilon",
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        initializer_range=0.018042,
        tie_word_embeddings=True,
    ),
    Field("sliding_window", "sliding_window", int, None),
    Field("use_bias", "use_bias", bool, True),
    Fixed("hidden_act", ("gelu_pytorch_tanh", "gelu_new")),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_sizes(values, FIELDS, 10000.0))


def write_config(config: Config) -> dict[str, Any]:
    return write_sizes("starcoder2", config, FIELDS)


def table(config: Config) -> MappingTable:
    names = {"c_fc": "up", "c_proj": "down"}
    layers = [
        rule
        for theirs, ours in names.items()
        for rule in linear(f"mlp.{theirs}", f"mlp/{ours}", "out in -> layer in out")
    ]
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *layers])
