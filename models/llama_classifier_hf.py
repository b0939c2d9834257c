"""`LlamaForSequenceClassification` and those of Mistral and Qwen in Hugging Face's format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from . import llama_hf
from .llama_classifier import Config

MODEL_TYPES = {
    kind: name.replace("CausalLM", "SequenceClassification")
    for kind, name in llama_hf.MODEL_TYPES.items()
}
FIELDS = (
    *llama_hf.FIELDS,
    *map(Read, ("id2label", "num_labels", "pad_token_id")),
    Fixed("problem_type", (None, "single_label_classification", "regression")),
)


def read_config(values: Mapping[str, Any]) -> Config:
    read_fields(values, FIELDS)
    base = llama_hf.read_config(values)
    sizes = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    names, padding = values.get("id2label"), values.get("pad_token_id")
    count = values.get("num_labels", 2) if names is None else len(names)
    for name, value in (("num_labels", count), ("pad_token_id", padding)):
        if type(value) is not int and (value, name) != (None, "pad_token_id"):
            raise PretrainedError(f"config.json: {name} is {value!r}, which is not an integer")
    return Config(**sizes, num_labels=count, pad_token_id=padding)


def write_config(config: Config) -> dict[str, Any]:
    names = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
    labels = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    return {**llama_hf.write_config(config), **labels, "pad_token_id": config.pad_token_id}


def table(config: Config) -> MappingTable:
    score = TensorRule("score.weight", "score/kernel", "classes embed -> embed classes")
    base = llama_hf.table(config)
    return dataclasses.replace(base, rules=[*base.rules, score], tied={})
