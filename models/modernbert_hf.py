"""`ModernBertForMaskedLM` and `ModernBertForSequenceClassification` in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .blocks import ACTIVATIONS
from .classification_hf import PROBLEMS, count_labels, write_labels
from .decoder_hf import GLOBAL, LOCAL, global_layers, norm_rules, read_rope_of_kinds, rope_of_kinds
from .modernbert import Config

MODEL_TYPES = {"modernbert": "ModernBertForMaskedLM"}
CLASSIFIER = "ModernBertForSequenceClassification"
_POOLING = ("cls", "mean")
FIELDS: tuple[Field | Fixed | Read, ...] = (
    Field("hidden_size", "hidden_size", int, 768),
    Field("num_hidden_layers", "num_hidden_layers", int, 22),
    Field("num_attention_heads", "num_attention_heads", int, 12),
    Field("intermediate_size", "intermediate_size", int, 1152),
    Field("vocab_size", "vocab_size", int, 50368),
    Field("max_position_embeddings", "max_position_embeddings", int, 8192),
    Field("local_attention", "local_attention", int, 128),
    Field("norm_eps", "layer_norm_eps", float, 1e-5),
    Field("norm_bias", "norm_bias", bool, False),
    Field("attention_bias", "attention_bias", bool, False),
    Field("mlp_bias", "mlp_bias", bool, False),
    Field("classifier_bias", "head_bias", bool, False),
    Field("decoder_bias", "decoder_bias", bool, True),
    Field("initializer_range", "initializer_range", float, 0.02),
    *map(Read, ("global_attn_every_n_layers", "layer_types", "rope_parameters", "rope_scaling")),
    *map(Read, ("global_rope_theta", "local_rope_theta", "rope_theta")),
    *map(Read, ("classifier_pooling", "classifier_activation", "original_max_position_embeddings")),
    *map(Read, ("id2label", "num_labels", "partial_rotary_factor")),
    Fixed("hidden_activation", ("gelu", *ACTIVATIONS)),
    Fixed("tie_word_embeddings", (True,)),
    PROBLEMS,
)


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_fields(values, FIELDS)
    kind = (values.get("architectures") or ["ModernBertForMaskedLM"])[0]
    if kind not in (CLASSIFIER, "ModernBertForMaskedLM"):
        raise PretrainedError(
            f"config.json: {kind} is not supported; ModernBertForMaskedLM and {CLASSIFIER} are"
        )
    activation = values.get("classifier_activation", "gelu")
    pooling = values.get("classifier_pooling", "cls")
    found["activation"] = values.get("hidden_activation", "gelu")
    if activation != found["activation"] or pooling not in _POOLING:
        raise PretrainedError(
            f"config.json: classifier_activation is {activation!r} and classifier_pooling "
            f"{pooling!r}; {found['activation']!r}, as hidden_activation, and one of {_POOLING} "
            "are supported"
        )
    theta = float(values.get("global_rope_theta", 160000.0))
    local = float(values.get("local_rope_theta", 10000.0))
    found["rope_theta"], scaling, found["rope_local_theta"] = read_rope_of_kinds(
        values, theta, local
    )
    if scaling is not None:
        raise PretrainedError("config.json: scaled rotary positions are not supported")
    layers = found["num_hidden_layers"]
    if values.get("layer_types") is None:
        alone = tuple(range(0, layers, values.get("global_attn_every_n_layers", 3)))
    else:
        alone = global_layers(values, layers, None)
    labels = count_labels(values) if kind == CLASSIFIER else None
    return Config(**found, global_layers=alone, mean_pooling=pooling == "mean", num_labels=labels)


def write_config(config: Config) -> dict[str, Any]:
    c = config
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    written = {
        "model_type": "modernbert",
        **write_fields(c, FIELDS),
        "hidden_activation": c.activation,
        "classifier_activation": c.activation,
        "classifier_pooling": _POOLING[c.mean_pooling],
        "layer_types": [GLOBAL if each else LOCAL for each in c.is_global],
        "global_rope_theta": c.rope_theta,
        "local_rope_theta": c.rope_local_theta,
        "rope_parameters": rope_of_kinds(rope, c.rope_local_theta),
        "pad_token_id": None,
    }
    # Versions before layer_types know a period.
    periods = [n for n in range(1, len(c.is_global) + 1) if c.is_global == _every(n, c)]
    if periods:
        written["global_attn_every_n_layers"] = periods[0]
    if c.num_labels is None:
        return written
    return {"architectures": [CLASSIFIER], **written, **write_labels(c.num_labels)}


def _every(period: int, config: Config) -> list[bool]:
    return [layer % period == 0 for layer in range(config.num_hidden_layers)]


def table(config: Config) -> MappingTable:
    first, rest = "model.layers.0", "model.layers.{layer}"
    rules = [
        TensorRule("model.embeddings.tok_embeddings.weight", "embed/table", kind="embedding"),
        *norm_rules("model.embeddings.norm", "embed_norm"),
        *_block_rules(first, "first", "", {}),
        *_block_rules(rest, "blocks", "layer ", {"layer": 1}),
        *norm_rules("model.final_norm", "norm"),
        TensorRule("head.dense.weight", "transform/kernel", "out in -> in out"),
        TensorRule("head.dense.bias", "transform/bias"),
        *norm_rules("head.norm", "head_norm"),
        TensorRule("decoder.bias", "head_bias"),
        TensorRule("classifier.weight", "score/kernel", "out in -> in out"),
        TensorRule("classifier.bias", "score/bias"),
    ]
    tied = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    return MappingTable(rules, tied=tied if config.num_labels is None else {})


def _block_rules(theirs: str, ours: str, stack: str, first: Mapping[str, int]) -> list[TensorRule]:
    def rule(tensor: str, paths: str, part: str, layout: str) -> TensorRule:
        inside = tuple(f"{ours}/{path}/{part}" for path in paths.split())
        layout = layout.replace("-> ", f"-> {stack}")
        where = inside if len(inside) > 1 else inside[0]
        return TensorRule(f"{theirs}.{tensor}", where, layout, first=first)

    qkv, gated = "attn/q_proj attn/k_proj attn/v_proj", "mlp/gate mlp/up"
    heads = "(part heads dim) embed -> embed heads dim"
    weights = (
        ("attn.Wqkv", qkv, heads, "(part heads dim) -> heads dim"),
        ("attn.Wo", "attn/o_proj", "embed (heads dim) -> heads dim embed", "embed -> embed"),
        ("mlp.Wi", gated, "(part out) in -> in out", "(part out) -> out"),
        ("mlp.Wo", "mlp/down", "out in -> in out", "out -> out"),
    )  # fmt: skip
    rules = []
    for tensor, paths, weight, bias in weights:
        rules.append(rule(f"{tensor}.weight", paths, "kernel", weight))
        rules.append(rule(f"{tensor}.bias", paths, "bias", bias))
    for name in ("attn_norm", "mlp_norm") if first else ("mlp_norm",):
        rules.append(rule(f"{name}.weight", name, "scale", "embed -> embed"))
        rules.append(rule(f"{name}.bias", name, "bias", "embed -> embed"))
    return rules
