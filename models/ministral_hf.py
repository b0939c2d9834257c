"""Ministral and Ministral 3 (its language model) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
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
    found = read_fields(values, FIELDS)
    layers = found["num_hidden_layers"]
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if values["model_type"] == "ministral3":
        if GROWTH not in rope:
            raise PretrainedError(f"config.json: rope_parameters has no {GROWTH}")
        found["query_growth"] = rope.pop(GROWTH)
        rope.pop("max_position_embeddings", None)
    elif "sliding_window" not in values:
        found["sliding_window"] = 4096
    found["rope_theta"], found["rope_scaling"] = read_rope({**values, "rope_parameters": rope}, 1e4)
    kinds = read_layers(values, layers) or [LOCAL] * layers
    found["global_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == GLOBAL)
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    written = write_sizes(config, FIELDS) | write_rope(config)
    if config.query_growth is not None:
        if config.sliding_window is not None and config.global_layers:
            raise ValueError("Hugging Face's ministral3 has one window for all layers")
        grown = {GROWTH: config.query_growth}
        both = {name: written[name] | grown for name in ("rope_scaling", "rope_parameters")}
        return {"model_type": "ministral3", **written, **both}
    windowed = config.sliding_window is not None
    kinds = [LOCAL if windowed and not each else GLOBAL for each in config.is_global]
    return {"model_type": "ministral", **written, "layer_types": kinds}


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
