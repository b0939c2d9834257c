"""Classifiers in Hugging Face's files: numbers of labels, and the scores of decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Fixed, read_fields
from jaxspeed.interop.mapping import TensorRule

from .language import DecoderHead

SCORED = "ForSequenceClassification"
# By the model type of a decoder: what stands before SCORED in the name of its classifier.
DECODERS = {
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "glm": "Glm",
    "glm4": "Glm4",
    "starcoder2": "Starcoder2",
    "exaone4": "Exaone4",
    "seed_oss": "SeedOss",
    "arcee": "Arcee",
    "gpt_neox": "GPTNeoX",
    "falcon": "Falcon",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
}
# The padding of a config.json without any, where transformers' class has one.
_PADDING = dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere", "cohere2"), 0)
_PADDING |= dict.fromkeys(("olmo2", "olmo3", "seed_oss"), 1) | {"ministral3": 11, "phi3": 32000}
_PADDING |= {"smollm3": 128004, "glm": 151329, "glm4": 151329}
PROBLEMS = Fixed("problem_type", (None, "single_label_classification", "regression"))
SCORE = TensorRule("score.weight", "score/kernel", "classes embed -> embed classes")


def count_labels(values: Mapping[str, Any]) -> int:
    names = values.get("id2label")
    count = values.get("num_labels", 2) if names is None else len(names)
    if type(count) is not int:
        raise PretrainedError(f"config.json: num_labels is {count!r}, which is not an integer")
    return count


def is_scored(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a classifier of sequences."""
    return str((values.get("architectures") or [""])[0]).endswith(SCORED)


def head_fields(values: Mapping[str, Any]) -> Sequence[Fixed]:
    return [PROBLEMS] if is_scored(values) else []


def read_head(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a decoder's `DecoderHead`; none of a language model."""
    if not is_scored(values):
        return {}
    read_fields(values, head_fields(values))
    padding = values.get("pad_token_id", _PADDING.get(values["model_type"]))
    if type(padding) not in (int, type(None)):
        raise PretrainedError(f"config.json: pad_token_id is {padding!r}, which is not an integer")
    return {"num_labels": count_labels(values), "pad_token_id": padding}


def write_head(kind: str, config: DecoderHead) -> dict[str, Any]:
    """The fields of a decoder that is a classifier.

    Of a language model without padding: the default of some classes is larger than a vocabulary.

    Raises:
      ValueError: Hugging Face has no classifier of this type.
    """
    padding = {"pad_token_id": config.pad_token_id}
    if config.num_labels is None:
        return padding if kind in _PADDING else {}
    if kind not in DECODERS:
        raise ValueError(f"Hugging Face has no sequence classifier of {kind}")
    names = {"architectures": [DECODERS[kind] + SCORED]}
    return names | padding | write_labels(config.num_labels)


def write_labels(count: int) -> dict[str, Any]:
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
