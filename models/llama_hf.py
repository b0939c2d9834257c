"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    decoder_table,
    read_sizes,
    size_fields,
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
        found["sliding_window"] = _window_of_all(values)
    return Config(**found)


def _window_of_all(values: Mapping[str, Any]) -> int | None:
    """Qwen's window, which the layers from `max_window_layers` on have."""
    layers = values.get("num_hidden_layers")
    kinds = set(values.get("layer_types") or ())
    if not kinds:
        first = values.get("max_window_layers", layers)
        kinds = {"sliding_attention"} if first == 0 else {"full_attention"}
        kinds |= {"sliding_attention"} if first < layers else set()
    if len(kinds) > 1:
        raise PretrainedError(
            "config.json: use_sliding_window for some layers only is not supported"
        )
    return values["sliding_window"] if kinds == {"sliding_attention"} else None


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
    if (c.qkv_bias != c.o_bias and kind != "qwen2") or (c.mlp_bias and kind != "llama"):
        raise ValueError(f"Hugging Face's {kind} has no such biases")
    return write_sizes(kind, c, FIELDS) | more


def _qwen_window(config: Config) -> dict[str, Any]:
    used = config.sliding_window is not None
    return {
        "use_sliding_window": used,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if used else config.num_hidden_layers,
        "layer_types": ["sliding_attention" if used else "full_attention"]
        * config.num_hidden_layers,
    }


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *HEAD_NORMS, *GATED])
