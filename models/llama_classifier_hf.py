"""`LlamaForSequenceClassification` and those of Mistral and Qwen in Hugging Face's format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Read, read_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from . import llama_hf
from .classification_hf import PROBLEMS, count_labels, write_labels
from .llama_classifier import Config

MODEL_TYPES = {
    kind: name.replace("CausalLM", "SequenceClassification")
    for kind, name in llama_hf.MODEL_TYPES.items()
}
FIELDS = (
    *llama_hf.FIELDS,
    *map(Read, ("id2label", "num_labels", "pad_token_id")),
    PROBLEMS,
)


def read_config(values: Mapping[str, Any]) -> Config:
    read_fields(values, FIELDS)
    base = llama_hf.read_config(values)
    sizes = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    padding = values.get("pad_token_id")
    if type(padding) not in (int, type(None)):
        raise PretrainedError(f"config.json: pad_token_id is {padding!r}, which is not an integer")
    return Config(**sizes, num_labels=count_labels(values), pad_token_id=padding)


def write_config(config: Config) -> dict[str, Any]:
    labels = write_labels(config.num_labels)
    return {**llama_hf.write_config(config), **labels, "pad_token_id": config.pad_token_id}


def table(config: Config) -> MappingTable:
    score = TensorRule("score.weight", "score/kernel", "classes embed -> embed classes")
    base = llama_hf.table(config)
    return dataclasses.replace(base, rules=[*base.rules, score], tied={})
