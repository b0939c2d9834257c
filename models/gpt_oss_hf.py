"""gpt-oss in Hugging Face's format: all experts in one tensor, gate and up interleaved.

Published folders have the experts' weights in MXFP4, which are dequantized when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import (
    ATTENTION,
    BLOCK,
    GLOBAL,
    LOCAL,
    NORMS_BEFORE,
    OURS,
    decoder_table,
    read_layers,
    read_sizes,
    size_fields,
    write_sizes,
)
from .gpt_oss import Config
from .mixture_hf import read_balance, write_balance

MODEL_TYPES = {"gpt_oss": "GptOssForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=False),
    Field("num_local_experts", "num_experts", int, 128),
    Field("num_experts_per_tok", "num_experts_per_tok", int, 4),
    Field("sliding_window", "sliding_window", int, 128),
    Field("swiglu_alpha", "swiglu_alpha", float, 1.702),
    Field("swiglu_limit", "swiglu_limit", float, 7.0),
    *map(Read, ("layer_types", "router_aux_loss_coef", "output_router_logits")),
    *map(Read, ("experts_per_token", "initial_context_length")),  # other names of the same
    Fixed("hidden_act", ("silu",)),
    Fixed("attention_bias", (True,)),
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read_config(values: Mapping[str, Any]) -> Config:
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        values = {**values, "rope_parameters": _ROPE}
    found = read_sizes(values, FIELDS, 150000.0)
    kinds = read_layers(values, found["num_hidden_layers"])
    if kinds is not None:
        found["global_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == GLOBAL)
    return Config(**found, **read_balance(values))


def write_config(config: Config) -> dict[str, Any]:
    return {
        **write_sizes("gpt_oss", config, FIELDS),
        **write_balance(config),
        "layer_types": [GLOBAL if is_global else LOCAL for is_global in config.is_global],
    }


def table(config: Config) -> MappingTable:
    def ours(*names: str) -> tuple[str, ...]:
        return tuple(f"{OURS}/mlp/{name}" for name in names)

    rules = [
        TensorRule(f"{BLOCK}.self_attn.sinks", f"{OURS}/attn/sinks"),
        TensorRule(f"{BLOCK}.mlp.router.weight", ours("router"), "out in -> layer in out"),
        TensorRule(f"{BLOCK}.mlp.router.bias", ours("router_bias")),
        TensorRule(
            f"{BLOCK}.mlp.experts.gate_up_proj",
            ours("w_gate", "w_up"),
            "expert in (out part) -> layer expert in out",
        ),
        TensorRule(
            f"{BLOCK}.mlp.experts.gate_up_proj_bias",
            ours("b_gate", "b_up"),
            "expert (out part) -> layer expert out",
        ),
        TensorRule(f"{BLOCK}.mlp.experts.down_proj", ours("w_down")),
        TensorRule(f"{BLOCK}.mlp.experts.down_proj_bias", ours("b_down")),
    ]
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *rules])
