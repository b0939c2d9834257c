"""OLMo 2 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import (
    ATTENTION,
    BLOCK,
    GATED,
    OURS,
    decoder_table,
    read_sizes,
    size_fields,
    write_sizes,
)
from .olmo2 import Config

MODEL_TYPES = {"olmo2": "Olmo2ForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-5, tie_word_embeddings=False),
    Field("attention_bias", "attention_bias", bool, False),
    Fixed("hidden_act", ("silu",)),
)
NORMS = {
    "post_attention_layernorm": "attn_out_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_sizes(values, FIELDS, 10000.0))


def write_config(config: Config) -> dict[str, Any]:
    return write_sizes("olmo2", config, FIELDS)


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
