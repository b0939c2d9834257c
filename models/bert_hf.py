"""`BertForMaskedLM` and `BertForSequenceClassification` in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .bert import Config
from .classification_hf import PROBLEMS, count_labels, write_labels
from .decoder_hf import linear, norm_rules

MODEL_TYPES = {"bert": "BertForMaskedLM"}
CLASSIFIER = "BertForSequenceClassification"
FIELDS: tuple[Field | Fixed | Read, ...] = (
    *(
        Field(name, name)
        for name in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
            "vocab_size",
        )
    ),
    Field("max_position_embeddings", "max_position_embeddings", int, 512),
    Field("type_vocab_size", "type_vocab_size", int, 2),
    Field("layer_norm_eps", "layer_norm_eps", float, 1e-12),
    Field("initializer_range", "initializer_range", float, 0.02),
    Fixed("tie_word_embeddings", (True,)),
    *map(Read, ("id2label", "num_labels")),
    Fixed("hidden_act", ("gelu",)),
    Fixed("position_embedding_type", ("absolute",)),
    Fixed("is_decoder", (False,)),
    Fixed("add_cross_attention", (False,)),
    PROBLEMS,
)


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_fields(values, FIELDS)
    kind = (values.get("architectures") or ["BertForMaskedLM"])[0]
    if kind not in (CLASSIFIER, "BertForMaskedLM", "BertForPreTraining"):
        raise PretrainedError(
            f"config.json: {kind} is not supported; BertForMaskedLM and {CLASSIFIER} are"
        )
    return Config(**found, num_labels=count_labels(values) if kind == CLASSIFIER else None)


def write_config(config: Config) -> dict[str, Any]:
    written = {"model_type": "bert", **write_fields(config, FIELDS)}
    if config.num_labels is None:
        return written
    return {"architectures": [CLASSIFIER], **written, **write_labels(config.num_labels)}


def table(config: Config) -> MappingTable:
    """For a masked language model without the pooler, which predicted the next sentence."""
    block, heads = "bert.encoder.layer.{layer}", "(heads dim) -> layer heads dim"
    head, flat = "cls.predictions", "out in -> layer in out"
    square = "out in -> in out"
    tables = {"word": "embed", "position": "positions", "token_type": "types"}
    without = (
        ("bert.pooler.dense.weight", "bert.pooler.dense.bias") if config.num_labels is None else ()
    )
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    rules = [
        *(
            TensorRule(
                f"bert.embeddings.{theirs}_embeddings.weight", f"{ours}/table", kind="embedding"
            )
            for theirs, ours in tables.items()
        ),
        *norm_rules("bert.embeddings.LayerNorm", "embed_norm"),
        *(
            rule
            for theirs, ours in names.items()
            for rule in linear(
                f"attention.self.{theirs}",
                f"attn/{ours}",
                "(heads dim) embed -> layer embed heads dim",
                heads,
                block=block,
            )
        ),
        *linear(
            "attention.output.dense",
            "attn/o_proj",
            "embed (heads dim) -> layer heads dim embed",
            block=block,
        ),
        *norm_rules(f"{block}.attention.output.LayerNorm", "blocks/attn_norm"),
        *linear("intermediate.dense", "mlp/up", flat, block=block),
        *linear("output.dense", "mlp/down", flat, block=block),
        *norm_rules(f"{block}.output.LayerNorm", "blocks/mlp_norm"),
        *(
            TensorRule(f"{theirs}.{part}", f"{ours}/{own}", layout)
            for theirs, ours in (
                (f"{head}.transform.dense", "transform"),
                ("bert.pooler.dense", "pooler"),
                ("classifier", "score"),
            )
            for part, own, layout in (("weight", "kernel", square), ("bias", "bias", ""))
        ),
        *norm_rules(f"{head}.transform.LayerNorm", "head_norm"),
        TensorRule(f"{head}.bias", "head_bias"),
    ]
    ignored = ["bert.embeddings.position_ids", *without]
    ignored += [f"cls.seq_relationship.{name}" for name in ("weight", "bias")]
    tied = {
        f"{head}.decoder.weight": "bert.embeddings.word_embeddings.weight",
        f"{head}.decoder.bias": f"{head}.bias",
    }
    return MappingTable(rules, ignored=ignored, tied=tied)


def old_table(config: Config) -> MappingTable:
    """The table of a folder whose norms have the names of the first release."""
    found = table(config)

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", GAMMA[1:]).replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    return replace(found, rules=[replace(rule, tensor=old(rule.tensor)) for rule in found.rules])


GAMMA = ".LayerNorm.gamma"
OTHER_TABLES = {GAMMA: old_table}
