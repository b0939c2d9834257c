"""EXAONE 4 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read
from jaxspeed.interop.mapping import MappingTable

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
from .exaone4 import Config
from .olmo2_hf import NORMS

MODEL_TYPES = {"exaone4": "Exaone4ForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=32, rms_norm_eps=1e-5, tie_word_embeddings=False),
    Field("sliding_window", "sliding_window", int, None),
    *map(Read, ("sliding_window_pattern", "layer_types")),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    if "sliding_window" not in values:
        values = {**values, "sliding_window": 4096}
    found = read_sizes(values, FIELDS, 10000.0)
    if found["sliding_window"] is not None:
        pattern = values.get("sliding_window_pattern", 4)
        period = len(pattern) if isinstance(pattern, str) else pattern  # LLLG is 4
        found["global_layers"] = global_layers(values, found["num_hidden_layers"], period)
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    return {**write_sizes("exaone4", config, FIELDS), "layer_types": write_layers(config)}


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS, [*ATTENTION, *HEAD_NORMS, *GATED])
