"""Falcon in Hugging Face's format: queries, keys and values are one tensor, in one of three orders.

All queries first; or a query, a key and a value of each head; or those of each key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import QKV, linear, norm_rules, read_sizes, size_fields, with_head, write_sizes
from .falcon import Config

MODEL_TYPES = {"falcon": "FalconForCausalLM"}
# Ours that have another name there, or no field.
_OWN = ("num_key_value_heads", "intermediate_size")
FIELDS = (
    *(
        field
        for field in size_fields(
            "layer_norm_epsilon",
            rms_norm_eps=1e-5,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        if field.theirs not in _OWN
    ),
    *(
        Field(name, name, bool, default)
        for name, default in (
            *(("new_decoder_architecture", False), ("parallel_attn", True)),
            *(("alibi", False), ("bias", False)),
        )
    ),
    *map(Read, ("num_kv_heads", "multi_query", "ffn_hidden_size", "num_ln_in_parallel_attn")),
    Fixed("activation", ("gelu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    heads = values.get("num_attention_heads")
    new = values.get("new_decoder_architecture", False)
    few = values.get("multi_query", True) and not new
    norms = values.get("num_ln_in_parallel_attn") or (2 if new else 1)
    sizes = {
        "num_key_value_heads": 1 if few else values.get("num_kv_heads") or heads,
        "intermediate_size": values.get("ffn_hidden_size") or 4 * values.get("hidden_size", 0),
    }
    own = [Field(name, name) for name in sizes]
    found = read_sizes({**values, **sizes}, [*FIELDS, *own], 10000.0)
    if norms not in (1, 2) or (norms == 2 and not new):
        raise PretrainedError(
            f"config.json: num_ln_in_parallel_attn is {norms}; 1, or 2 with "
            "new_decoder_architecture, is supported"
        )
    if new and not found["parallel_attn"]:
        raise PretrainedError("config.json: new_decoder_architecture without parallel_attn")
    return Config(**found, num_norms=norms)


def write_config(config: Config) -> dict[str, Any]:
    c = config
    each = c.num_key_value_heads == c.num_attention_heads
    few = c.num_key_value_heads == 1 and not c.new_decoder_architecture
    if not (few or each or c.new_decoder_architecture) or c.hidden_size != (
        c.size_of_head * c.num_attention_heads
    ):
        raise ValueError(
            "Hugging Face's falcon has hidden_size / num_attention_heads dims a head, and other "
            "numbers of key heads than 1 or that of query heads in its new_decoder_architecture"
        )
    written = write_sizes("falcon", c, FIELDS)
    del written["head_dim"]  # a property there
    return {
        **written,
        "num_kv_heads": c.num_attention_heads if few else c.num_key_value_heads,
        "multi_query": few,
        "ffn_hidden_size": c.intermediate_size,
        "num_ln_in_parallel_attn": c.num_norms,
    }


def table(config: Config) -> MappingTable:
    c, block = config, "transformer.h.{layer}"
    sizes = {}
    if c.new_decoder_architecture:
        order, heads, sizes = (
            "(group part each dim)",
            "(group each)",
            {"group": c.num_key_value_heads},
        )
    elif c.num_key_value_heads == 1:
        order, heads = "(part heads dim)", "heads"
    else:
        order, heads = "(heads part dim)", "heads"
    fused = f"{block}.self_attention.query_key_value"
    names = (
        ("ln_attn", "ln_mlp")
        if c.parallel_attn and c.num_norms == 2
        else (
            "input_layernorm",
            "post_attention_layernorm",
        )
    )
    flat = "out in -> layer in out"
    made = MappingTable(
        [
            TensorRule("transformer.word_embeddings.weight", "embed/table", kind="embedding"),
            *norm_rules("transformer.ln_f", "norm"),
            *norm_rules(f"{block}.{names[0]}", "blocks/attn_norm"),
            *norm_rules(f"{block}.{names[1]}", "blocks/mlp_norm"),
            TensorRule(
                f"{fused}.weight",
                tuple(f"blocks/attn/{name}/kernel" for name in QKV),
                f"{order} embed -> layer embed {heads} dim",
                sizes,
            ),
            TensorRule(
                f"{fused}.bias",
                tuple(f"blocks/attn/{name}/bias" for name in QKV),
                f"{order} -> layer {heads} dim",
                sizes,
            ),
            *linear(
                "self_attention.dense",
                "attn/o_proj",
                "embed (heads dim) -> layer heads dim embed",
                block=block,
            ),
            *linear("mlp.dense_h_to_4h", "mlp/up", flat, block=block),
            *linear("mlp.dense_4h_to_h", "mlp/down", flat, block=block),
        ],
        ignored=[f"{block}.self_attention.rotary_emb.inv_freq"],
        prefix="transformer.",
    )
    return with_head(made, c, "lm_head.weight", "transformer.word_embeddings.weight")
