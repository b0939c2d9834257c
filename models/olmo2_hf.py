"""OLMo 2 and 3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .classification_hf import read_head
from .decoder_hf import (
    ATTENTION,
    BLOCK,
    GATED,
    OURS,
    decoder_table,
    global_layers,
    read_rope_of_kinds,
    read_sizes,
    rope_of_kinds,
    size_fields,
    write_layers,
    write_sizes,
)
from .olmo2 import Config

MODEL_TYPES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-5, tie_word_embeddings=False),
    Field("attention_bias", "attention_bias", bool, False),
    *map(Read, ("sliding_window", "layer_types")),
    Fixed("hidden_act", ("silu",)),
)
NORMS = {
    "post_attention_layernorm": "attn_out_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def read_config(values: Mapping[str, Any]) -> Config:
    if values["model_type"] == "olmo2":
        return Config(**read_sizes(values, FIELDS, 10000.0))
    theta, scaling, local = read_rope_of_kinds(values, 500000.0)
    if local not in (None, theta):
        raise PretrainedError("config.json: rope_theta of local and global layers must be equal")
    found = read_fields(values, [*FIELDS, Field("sliding_window", "sliding_window", int, 4096)])
    found |= {"rope_theta": theta, "rope_scaling": scaling, **read_head(values)}
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    alone = global_layers(values, found["num_hidden_layers"], 4)
    return Config(**found, global_layers=alone)


def write_config(config: Config) -> dict[str, Any]:
    if config.sliding_window is None:
        return write_sizes("olmo2", config, FIELDS)
    written = write_sizes("olmo3", config, FIELDS)
    rope = rope_of_kinds(written["rope_parameters"], config.rope_theta)
    window = {"sliding_window": config.sliding_window, "layer_types": write_layers(config)}
    return {**written, **window, "rope_parameters": rope}


def table(config: Config) -> MappingTable:
    """The norms of queries and keys are over all heads, which are one dim there."""
    over_heads = [
        TensorRule(
            f"{BLOCK}.self_attn.{name}.weight",
            f"{OURS}/attn/{name}/scale",
            "(heads dim) -> layer heads dim",
        )
        for name in ("q_norm", "k_norm")
    ]
    return decoder_table(config, NORMS, [*ATTENTION, *over_heads, *GATED])
