"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    LOCAL,
    NORMS_BEFORE,
    decoder_table,
    global_layers,
    read_sizes,
    size_fields,
    write_layers,
    write_sizes,
)
from .llama import Config

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-6, tie_word_embeddings=False),
    Fixed("hidden_act", ("silu",)),
    *map(Read, ("attention_bias", "mlp_bias", "sliding_window", "use_sliding_window")),
    *map(Read, ("layer_types", "max_window_layers")),
)


def read_config(values: Mapping[str, Any]) -> Config:
    kind = values["model_type"]
    found = read_sizes(values, FIELDS, 10000.0)
    bias = bool(values.get("attention_bias", False))
    found["qkv_bias"] = kind == "qwen2" or bias
    found["o_bias"] = bias
    found["mlp_bias"] = bool(values.get("mlp_bias", False))
    found["qk_norm"] = kind == "qwen3"
    if kind == "qwen3":
        found["head_dim"] = found["head_dim"] or 128
    if kind == "mistral":
        window = Field("sliding_window", "sliding_window", int, None)
        found |= read_fields(values, [window])
    elif values.get("use_sliding_window") and values.get("sliding_window"):
        layers = found["num_hidden_layers"]
        alone = global_layers(values, layers, None)
        if values.get("layer_types") is None:
            alone = tuple(range(min(values.get("max_window_layers", 28), layers)))
        if len(alone) < layers:
            found |= read_fields(values, [Field("sliding_window", "sliding_window")])
            found["global_layers"] = alone
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    """As the first family that has what the config has."""
    c = config
    kind = "llama"
    more: dict[str, Any] = {"attention_bias": c.o_bias, "mlp_bias": c.mlp_bias}
    if c.qk_norm:
        kind = "qwen3"
        more = {"attention_bias": c.o_bias, **_qwen_window(c)}
    elif c.qkv_bias and not c.o_bias:
        kind = "qwen2"
        more = _qwen_window(c)
    elif c.sliding_window is not None:
        kind = "mistral"
        more = {"sliding_window": c.sliding_window}
    if c.global_layers and kind == "mistral":
        raise ValueError("Hugging Face's mistral has one sliding window for all layers")
    if (c.qkv_bias != c.o_bias and kind != "qwen2") or (c.mlp_bias and kind != "llama"):
        raise ValueError(f"Hugging Face's {kind} has no such biases")
    return write_sizes(kind, c, FIELDS) | more


def _qwen_window(config: Config) -> dict[str, Any]:
    kinds = write_layers(config)
    return {
        "use_sliding_window": LOCAL in kinds,
        "sliding_window": config.sliding_window,
        "max_window_layers": [*kinds, LOCAL].index(LOCAL),
        "layer_types": kinds,
    }


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *HEAD_NORMS, *GATED])
