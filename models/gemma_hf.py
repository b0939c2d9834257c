"""Gemma 2 and 3 (its text model) in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .classification_hf import read_head
from .decoder_hf import (
    ATTENTION,
    GATED,
    GLOBAL,
    HEAD_NORMS,
    LOCAL,
    decoder_table,
    global_layers,
    read_rope,
    read_rope_of_kinds,
    rope_of_kinds,
    size_fields,
    write_sizes,
)
from .gemma import Config

MODEL_TYPES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
# Gemma 3 with images: the fields that its text_config lacks where they have these values.
LANGUAGE_MODELS = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }
}

FIELDS = (
    *size_fields(
        head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=True
    ),
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", float, 256),
    Field("sliding_window", "sliding_window", int, 4096),
    Field("attn_logit_softcapping", "attn_logit_softcapping", float, None),
    Field("final_logit_softcapping", "final_logit_softcapping", float, None),
    *map(Read, ("layer_types", "sliding_window_pattern", "rope_local_base_freq")),
    Fixed("hidden_activation", ("gelu_pytorch_tanh",)),
    Fixed("attention_bias", (False,)),
    Fixed("use_bidirectional_attention", (False, None)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_fields(values, FIELDS) | read_head(values)
    third = values["model_type"] == "gemma3_text"
    if not third:  # published configs of Gemma 2 have them; they are also the defaults
        found["attn_logit_softcapping"] = values.get("attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = values.get("final_logit_softcapping", 30.0)
    found["qk_norm"] = third
    period = values.get("sliding_window_pattern", 6 if third else 2)
    found["global_layers"] = global_layers(values, found["num_hidden_layers"], period)
    if third:
        local = float(values.get("rope_local_base_freq", 1e4))
        found["rope_theta"], found["rope_scaling"], found["rope_local_theta"] = read_rope_of_kinds(
            values, 1e6, local
        )
    else:
        found["rope_theta"], found["rope_scaling"] = read_rope(values, 1e4)
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    kinds = {"layer_types": [GLOBAL if g else LOCAL for g in config.is_global.tolist()]}
    if not config.qk_norm:
        if config.rope_local_theta is not None:
            raise ValueError("Hugging Face's gemma2 has one rotation for all layers")
        return write_sizes("gemma2", config, FIELDS) | kinds
    written = write_sizes("gemma3_text", config, FIELDS) | kinds
    local = config.rope_theta if config.rope_local_theta is None else config.rope_local_theta
    rotations = rope_of_kinds(written["rope_parameters"], local)
    del written["rope_scaling"]
    return {**written, "rope_local_base_freq": local, "rope_parameters": rotations}


NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS, [*ATTENTION, *HEAD_NORMS, *GATED])
