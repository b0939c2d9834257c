"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspeed import ops
from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .llama import Config

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

FIELDS = (
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_hidden_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_key_value_heads", "num_key_value_heads", int, None),
    Field("intermediate_size", "intermediate_size"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("head_dim", "head_dim", int, None),
    Field("rms_norm_eps", "rms_norm_eps", float, 1e-6),
    Field("initializer_range", "initializer_range", float, 0.02),
    Field("tie_word_embeddings", "tie_word_embeddings", bool, False),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    kind = values["model_type"]
    found = read_fields(values, FIELDS)
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    found["rope_theta"], found["rope_scaling"] = read_rope(values, 10000.0)
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


def read_rope(values: Mapping[str, Any], theta: float) -> tuple[float, ops.Scaling | None]:
    """(theta, scaling) in either spelling: `rope_scaling`, or transformers 5's `rope_parameters`.

    Raises:
      PretrainedError: unknown type or fields.
    """
    fields = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = fields.pop("rope_theta", None) or values.get("rope_theta") or theta
    if fields.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise PretrainedError("config.json: partial_rotary_factor is not supported")
    if fields and "rope_type" not in fields and "type" not in fields:
        raise PretrainedError(f"config.json: rope_scaling {fields} has no rope_type")
    try:
        if fields.get("rope_type", fields.get("type")) in ("yarn", "dynamic", "longrope"):
            context = values.get("max_position_embeddings")
            original = "original_max_position_embeddings"
            if fields.get(original) is None:
                fields[original] = values.get(original) or context
            if fields.get("factor") is None and context is not None:
                fields["factor"] = context / fields[original]
        for name, value in {"rope_theta": theta, **fields}.items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}")
        if not theta or fields.get("factor") == 0:
            raise ValueError(f"rope_theta {theta} and factor {fields.get('factor')}: not positive")
        return float(theta), ops.rope_scaling(fields) if fields else None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise PretrainedError(f"config.json: {error}") from None


def write_rope(theta: float, scaling: ops.Scaling | None) -> dict[str, Any]:
    """Both spellings: libraries know one or the other."""
    kind: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        set_fields = {k: v for k, v in dataclasses.asdict(scaling).items() if v is not None}
        kind = {"rope_type": scaling.rope_type, **set_fields}
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else kind,
        "rope_parameters": {"rope_theta": theta, **kind},
    }


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
    written = {**write_fields(c, FIELDS), "head_dim": c.size_of_head}
    return {"model_type": kind, **written, **more, **write_rope(c.rope_theta, c.rope_scaling)}


def _qwen_window(config: Config) -> dict[str, Any]:
    used = config.sliding_window is not None
    return {
        "use_sliding_window": used,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if used else config.num_hidden_layers,
        "layer_types": ["sliding_attention" if used else "full_attention"]
        * config.num_hidden_layers,
    }


def block_rules(block: str, ours: str) -> list[TensorRule]:
    """Attention and MLP of a block, whose weights have the output dim first."""
    attention = [
        rule
        for name in ("q_proj", "k_proj", "v_proj")
        for rule in (
            TensorRule(
                f"{block}.self_attn.{name}.weight",
                f"{ours}/attn/{name}/kernel",
                "(heads dim) embed -> layer embed heads dim",
            ),
            TensorRule(
                f"{block}.self_attn.{name}.bias",
                f"{ours}/attn/{name}/bias",
                "(heads dim) -> layer heads dim",
            ),
        )
    ]
    attention += [
        TensorRule(
            f"{block}.self_attn.o_proj.weight",
            f"{ours}/attn/o_proj/kernel",
            "embed (heads dim) -> layer heads dim embed",
        ),
        TensorRule(f"{block}.self_attn.o_proj.bias", f"{ours}/attn/o_proj/bias"),
        TensorRule(f"{block}.self_attn.q_norm.weight", f"{ours}/attn/q_norm/scale"),
        TensorRule(f"{block}.self_attn.k_norm.weight", f"{ours}/attn/k_norm/scale"),
    ]
    mlp = [
        rule
        for name in ("gate", "up", "down")
        for rule in (
            TensorRule(
                f"{block}.mlp.{name}_proj.weight",
                f"{ours}/mlp/{name}/kernel",
                "out in -> layer in out",
            ),
            TensorRule(f"{block}.mlp.{name}_proj.bias", f"{ours}/mlp/{name}/bias"),
        )
    ]
    return [*attention, *mlp]


def outer_rules() -> list[TensorRule]:
    """The rules outside of the blocks."""
    return [
        TensorRule("model.embed_tokens.weight", "embed/table"),
        TensorRule("model.norm.weight", "norm/scale"),
        TensorRule("lm_head.weight", "head/table"),
    ]


def ignored(tied: bool) -> list[str]:
    """Rotary buffers, which old versions stored; a tied head may be stored twice."""
    buffers = ["model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    return [*buffers, *(["lm_head.weight"] if tied else [])]


def table(config: Config) -> MappingTable:
    block, ours = "model.layers.{layer}", "blocks"
    return MappingTable(
        [
            *outer_rules(),
            TensorRule(f"{block}.input_layernorm.weight", f"{ours}/attn_norm/scale"),
            TensorRule(f"{block}.post_attention_layernorm.weight", f"{ours}/mlp_norm/scale"),
            *block_rules(block, ours),
        ],
        ignored=ignored(config.tie_word_embeddings),
        prefix="model.",
    )
