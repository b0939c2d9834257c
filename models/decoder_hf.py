"""What decoders have in common in Hugging Face's files: fields, rotary settings, mapping rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspeed import ops
from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fields, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .classification_hf import SCORE, head_fields, read_head, write_head
from .decoder import DecoderSizes, WindowedSizes

GLOBAL, LOCAL = "full_attention", "sliding_attention"
BLOCK, OURS = "model.layers.{layer}", "blocks"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# -- config.json -----------------------------------------------------------------------------------


def size_fields(eps: str = "rms_norm_eps", **defaults: Any) -> tuple[Field | Read, ...]:
    """The fields of `DecoderSizes`; without a default they are required. `eps` is a norm's name."""
    kinds = {"rms_norm_eps": float, "initializer_range": float, "tie_word_embeddings": bool}
    names = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "max_position_embeddings", "head_dim", *kinds),
    )
    defaults = {"head_dim": None, "initializer_range": 0.02} | defaults
    sizes = [
        Field(eps if n == "rms_norm_eps" else n, n, kinds.get(n, int), defaults.get(n, ...))
        for n in names
    ]
    rope = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
    return (*sizes, *map(Read, (*rope, "partial_rotary_factor")))


def read_sizes(
    values: Mapping[str, Any], fields: Fields, theta: float, partial: float | None = None
) -> dict[str, Any]:
    """The fields of ours, those of rotary positions too.

    Args:
      theta: the default of `rope_theta`.
      partial: that of `partial_rotary_factor`; None where all of a head is rotated.
    """
    found = read_fields(values, [*fields, *head_fields(values)]) | read_head(values)
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    if partial is not None:
        found["partial_rotary_factor"] = _partial(values, partial)
        values = {**values, "rope_parameters": _rope(values) | {"partial_rotary_factor": 1.0}}
    found["rope_theta"], found["rope_scaling"] = read_rope(values, theta)
    return found


def write_sizes(kind: str, config: DecoderSizes, fields: Fields) -> dict[str, Any]:
    """The contents of config.json of a model type.

    Rotary positions are in both spellings: libraries know one or the other.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        set_fields = {k: v for k, v in dataclasses.asdict(scaling).items() if v is not None}
        rope = {"rope_type": scaling.rope_type, **set_fields}
    partial = getattr(config, "partial_rotary_factor", None)
    part = {} if partial is None else {"partial_rotary_factor": partial}
    return {
        "model_type": kind,
        **write_fields(config, fields),
        "head_dim": config.size_of_head,
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else rope,
        **part,
        "rope_parameters": {"rope_theta": theta, **part, **rope},
        **write_head(kind, config),
    }


def read_layers(values: Mapping[str, Any], layers: int) -> list[str] | None:
    """`layer_types`, if it is there.

    Raises:
      PretrainedError: it is not one of two kinds for each layer.
    """
    kinds = values.get("layer_types")
    if kinds is not None and (len(kinds) != layers or set(kinds) - {GLOBAL, LOCAL}):
        raise PretrainedError(
            f"config.json: layer_types has {len(kinds)} of {sorted(set(kinds))}; {layers} of "
            f"{LOCAL} and {GLOBAL} are needed"
        )
    return kinds


def global_layers(values: Mapping[str, Any], layers: int, period: int | None) -> tuple[int, ...]:
    """Those of `layer_types`; without it every `period`-th one, or none."""
    kinds = read_layers(values, layers)
    if kinds is None:
        return tuple(range(period - 1, layers, period)) if period else ()
    return tuple(i for i, kind in enumerate(kinds) if kind == GLOBAL)


def write_layers(config: WindowedSizes) -> list[str]:
    """`layer_types`."""
    windowed = config.sliding_window is not None
    return [LOCAL if windowed and not alone else GLOBAL for alone in config.is_global]


def read_rope_of_kinds(
    values: Mapping[str, Any], theta: float, local: float | None = None
) -> tuple[float, ops.Scaling | None, float | None]:
    """(theta, scaling, theta of local layers), of which only global ones are scaled.

    Args:
      theta: the default of `rope_theta`.
      local: that of local layers where `rope_parameters` is not one for each kind of layers.
    """
    rope = values.get("rope_parameters") or {}
    if GLOBAL not in rope:
        return (*read_rope(values, theta), local)
    found = read_rope({**values, "rope_parameters": rope[GLOBAL]}, theta)
    local, scaling = read_rope({"rope_parameters": rope.get(LOCAL, {})}, local or found[0])
    if scaling is not None:
        raise PretrainedError("config.json: rope_parameters: only global layers are scaled")
    return (*found, local)


def rope_of_kinds(rope: dict[str, Any], local: float) -> dict[str, Any]:
    """`rope_parameters` with that of global layers."""
    return {LOCAL: {"rope_type": "default", "rope_theta": local}, GLOBAL: rope}


def read_rope(values: Mapping[str, Any], theta: float) -> tuple[float, ops.Scaling | None]:
    """(theta, scaling) in either spelling: `rope_scaling`, or transformers 5's `rope_parameters`.

    Raises:
      PretrainedError: unknown type or fields, or only a part of each head is rotated.
    """
    if _partial(values, 1.0) != 1.0:
        raise PretrainedError("config.json: partial_rotary_factor is not supported")
    fields = _rope(values)
    theta = fields.pop("rope_theta", None) or values.get("rope_theta") or theta
    fields.pop("partial_rotary_factor", None)
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


def _partial(values: Mapping[str, Any], default: float) -> float:
    """The part of each head that is rotated."""
    return _rope(values).get("partial_rotary_factor", values.get("partial_rotary_factor", default))


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(values.get("rope_parameters") or values.get("rope_scaling") or {})


# -- mapping rules: weights of linear layers have the output dim first -----------------------------


def linear(
    theirs: str, ours: str, weight: str, bias: str = "", block: str = BLOCK
) -> list[TensorRule]:
    """The rules of a linear layer in a block."""
    return [
        TensorRule(f"{block}.{theirs}.weight", f"{OURS}/{ours}/kernel", weight),
        TensorRule(f"{block}.{theirs}.bias", f"{OURS}/{ours}/bias", bias),
    ]


def norm_rules(theirs: str, ours: str) -> list[TensorRule]:
    """The rules of a norm, with a bias or without."""
    return [
        TensorRule(f"{theirs}.weight", f"{ours}/scale"),
        TensorRule(f"{theirs}.bias", f"{ours}/bias"),
    ]


QKV = ("q_proj", "k_proj", "v_proj")
HEADS = "(heads dim) embed -> layer embed heads dim"
ATTENTION = [
    *(
        rule
        for name in QKV
        for rule in linear(
            f"self_attn.{name}", f"attn/{name}", HEADS, "(heads dim) -> layer heads dim"
        )
    ),
    *linear("self_attn.o_proj", "attn/o_proj", "embed (heads dim) -> layer heads dim embed"),
]
# Norms of each head.
HEAD_NORMS = [
    TensorRule(f"{BLOCK}.self_attn.{name}.weight", f"{OURS}/attn/{name}/scale")
    for name in ("q_norm", "k_norm")
]
GATED = [
    rule
    for name in ("gate", "up", "down")
    for rule in linear(f"mlp.{name}_proj", f"mlp/{name}", "out in -> layer in out")
]
# The gate first, then up, in one tensor.
FUSED_GATED = [
    TensorRule(
        f"{BLOCK}.mlp.gate_up_proj.weight",
        (f"{OURS}/mlp/gate/kernel", f"{OURS}/mlp/up/kernel"),
        "(part out) in -> layer in out",
    ),
    TensorRule(
        f"{BLOCK}.mlp.down_proj.weight", f"{OURS}/mlp/down/kernel", "out in -> layer in out"
    ),
]
NORMS_BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}


def decoder_table(
    config: DecoderSizes, norms: Mapping[str, str], rules: Sequence[TensorRule]
) -> MappingTable:
    """The table of a decoder with these norms, and rules of attention and feed-forward."""
    # Rotary buffers, which old versions stored.
    ignored = [f"{BLOCK}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    made = MappingTable(
        [
            TensorRule(EMBEDDING, "embed/table", kind="embedding"),
            *norm_rules("model.norm", "norm"),
            *(
                rule
                for theirs, ours in norms.items()
                for rule in norm_rules(f"{BLOCK}.{theirs}", f"{OURS}/{ours}")
            ),
            *rules,
        ],
        ignored=ignored,
        prefix="model.",
    )
    return with_head(made, config, HEAD, EMBEDDING)


def with_head(table: MappingTable, config: Any, head: str, embedding: str) -> MappingTable:
    """A decoder's table with its head, or the scores of a classifier: its folder may have a head.

    Args:
      head, embedding: names of the tensors, which may be tied.
    """
    if config.num_labels is not None:
        rules, ignored = [*table.rules, SCORE], [*table.ignored, head]
        return dataclasses.replace(table, rules=rules, ignored=ignored)
    rules = [*table.rules, TensorRule(head, "head/table")]
    tied = {head: embedding} if config.tie_word_embeddings else {}
    return dataclasses.replace(table, rules=rules, tied=tied)
