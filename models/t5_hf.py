"""`T5ForConditionalGeneration` in Hugging Face's format: T5, T5 1.1 and FLAN-T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .blocks import ACTIVATIONS
from .t5 import Config

MODEL_TYPES = {"t5": "T5ForConditionalGeneration"}
FIELDS: tuple[Field | Fixed | Read, ...] = (
    Field("d_model", "hidden_size"),
    Field("d_kv", "head_dim"),
    Field("d_ff", "intermediate_size"),
    Field("num_layers", "num_hidden_layers"),
    Field("num_decoder_layers", "num_decoder_layers", int, None),
    Field("num_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("relative_attention_num_buckets", "num_buckets", int, 32),
    Field("relative_attention_max_distance", "max_distance", int, 128),
    Field("layer_norm_epsilon", "rms_norm_eps", float, 1e-6),
    Field("initializer_factor", "initializer_factor", float, 1.0),
    *map(Read, ("feed_forward_proj", "is_gated_act", "dense_act_fn", "dropout_rate")),
    *map(Read, ("tie_word_embeddings", "scale_decoder_outputs")),
    *map(Read, ("decoder_start_token_id", "eos_token_id")),
    Fixed("is_encoder_decoder", (True,)),
)
_GATED, _GELU = "gated-", {"gated-gelu": "gelu_new"}  # not what its name says


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_fields(values, FIELDS)
    name = values.get("feed_forward_proj", "relu")
    activation = _GELU.get(name, str(name).removeprefix(_GATED))
    ids = {n: values.get(n, default) for n, default in _IDS.items()}
    if activation not in ACTIVATIONS or any(type(each) is not int for each in ids.values()):
        raise PretrainedError(
            f"config.json: feed_forward_proj is {name!r} and ids are {ids}; activations are "
            f"{', '.join(ACTIVATIONS)}, and ids are integers"
        )
    # transformers 5 writes that the head is tied, and beside it whether its input is scaled.
    tied = values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True))
    return Config(
        **found,
        **ids,
        activation=activation,
        gated=str(name).startswith(_GATED),
        tie_word_embeddings=bool(tied),
    )


_IDS = {"decoder_start_token_id": 0, "eos_token_id": 1}


def write_config(config: Config) -> dict[str, Any]:
    c = config
    name = f"{_GATED}{c.activation}" if c.gated else c.activation
    spelled = {f"{_GATED}{activation}": spelled for spelled, activation in _GELU.items()}
    return {
        "model_type": "t5",
        **write_fields(c, FIELDS),
        "num_decoder_layers": c.decoder_layers,
        "feed_forward_proj": spelled.get(name, name),
        "tie_word_embeddings": c.tie_word_embeddings,
        "scale_decoder_outputs": c.tie_word_embeddings,
        **{n: getattr(c, n) for n in _IDS},
    }


def table(config: Config) -> MappingTable:
    rules = [TensorRule("shared.weight", "embed/table", kind="embedding")]
    tied = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        layer = f"{stack}.block.{{layer}}.layer"
        rules += [
            TensorRule(
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                f"{stack}_bias/table",
                kind="embedding",
            ),
            *_attention(f"{layer}.0.SelfAttention", f"{stack}/attn"),
            TensorRule(f"{layer}.0.layer_norm.weight", f"{stack}/attn_norm/scale"),
            *_feed_forward(f"{layer}.{last}.DenseReluDense", f"{stack}/mlp", config.gated),
            TensorRule(f"{layer}.{last}.layer_norm.weight", f"{stack}/mlp_norm/scale"),
            TensorRule(f"{stack}.final_layer_norm.weight", f"{stack}_norm/scale"),
        ]
    cross = "decoder.block.{layer}.layer.1"
    rules += [
        *_attention(f"{cross}.EncDecAttention", "decoder/cross"),
        TensorRule(f"{cross}.layer_norm.weight", "decoder/cross_norm/scale"),
        TensorRule("lm_head.weight", "head/table"),
    ]
    if config.tie_word_embeddings:
        tied["lm_head.weight"] = "shared.weight"
    # Of the first layer, which published files have and nothing reads.
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return MappingTable(rules, ignored=[unread], tied=tied)


def _attention(theirs: str, ours: str) -> list[TensorRule]:
    heads, out = (
        "(heads dim) embed -> layer embed heads dim",
        "embed (heads dim) -> layer heads dim embed",
    )
    return [
        *(
            TensorRule(f"{theirs}.{name}.weight", f"{ours}/{name}_proj/kernel", heads)
            for name in "qkv"
        ),
        TensorRule(f"{theirs}.o.weight", f"{ours}/o_proj/kernel", out),
    ]


def _feed_forward(theirs: str, ours: str, gated: bool) -> list[TensorRule]:
    up = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    return [
        TensorRule(f"{theirs}.{name}.weight", f"{ours}/{own}/kernel", "out in -> layer in out")
        for name, own in {**up, "wo": "down"}.items()
    ]
