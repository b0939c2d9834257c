"""Reference models in Flax NNX that call `jaxspeed.ops`, one file per family.

A family's module has `Config` (a frozen dataclass of sizes), `PRESETS` (configs by name),
`build(config, rngs)`, `loss(model, batch) -> (sum, weight)`, which gives samples that are marked as
padding no weight, and `objective(config)`, the name of the objective that it is; a classifier's has
an accuracy too, where `train` is False. The file beside it, NAME_hf.py, has its form in Hugging
Face's files: `read_config`, `write_config` and `table`, the rules by which tensors are read and
written. Families are imported on demand.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from flax import nnx

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import LARGEST, unsupported
from jaxspeed.interop.hf_folder import LanguageModelFolder, PretrainedFolder
from jaxspeed.interop.mapping import lines
from jaxspeed.interop.pretrained import FolderWeights, check_vocabulary, padding_of
from jaxspeed.user_models.pretrained_model import Pretrained

from .classification_hf import DECODERS, is_scored
from .language import classifier_loss, is_classifier

FAMILIES: dict[str, str] = {
    "gpt2": "jaxspeed.models.gpt2",
    "llama": "jaxspeed.models.llama",
    "gemma": "jaxspeed.models.gemma",
    "gemma1": "jaxspeed.models.gemma1",
    "phi3": "jaxspeed.models.phi3",
    "granite": "jaxspeed.models.granite",
    "smollm3": "jaxspeed.models.smollm3",
    "ministral": "jaxspeed.models.ministral",
    "olmo2": "jaxspeed.models.olmo2",
    "glm4": "jaxspeed.models.glm4",
    "cohere": "jaxspeed.models.cohere",
    "starcoder2": "jaxspeed.models.starcoder2",
    "exaone4": "jaxspeed.models.exaone4",
    "seed_oss": "jaxspeed.models.seed_oss",
    "arcee": "jaxspeed.models.arcee",
    "gpt_neox": "jaxspeed.models.gpt_neox",
    "falcon": "jaxspeed.models.falcon",
    "mixtral": "jaxspeed.models.mixtral",
    "deepseek": "jaxspeed.models.deepseek",
    "gpt_oss": "jaxspeed.models.gpt_oss",
    "llama_classifier": "jaxspeed.models.llama_classifier",
    "bert": "jaxspeed.models.bert",
    "modernbert": "jaxspeed.models.modernbert",
    "t5": "jaxspeed.models.t5",
    "vit": "jaxspeed.models.vit",
    "llava": "jaxspeed.models.llava",
    "smolvlm": "jaxspeed.models.smolvlm",
    "gemma3": "jaxspeed.models.gemma3",
    "qwen2_5_vl": "jaxspeed.models.qwen2_5_vl",
    "mlp": "jaxspeed.models.mlp",
}

# Hugging Face's model types: the family of each.
MODEL_TYPES: dict[str, str] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma": "gemma1",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "phi3": "phi3",  # and Phi-4
    "granite": "granite",
    "smollm3": "smollm3",
    "ministral": "ministral",
    "ministral3": "ministral",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "glm": "glm4",  # GLM-4
    "glm4": "glm4",  # GLM-4-0414
    "cohere": "cohere",  # Command R
    "cohere2": "cohere",  # Command R7B
    "starcoder2": "starcoder2",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "arcee": "arcee",
    "gpt_neox": "gpt_neox",  # Pythia
    "falcon": "falcon",
    "mixtral": "mixtral",
    "qwen3_moe": "mixtral",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gpt_oss": "gpt_oss",
    "bert": "bert",
    "modernbert": "modernbert",
    "t5": "t5",  # and FLAN-T5
    "vit": "vit",
    "llava": "llava",
    "smolvlm": "smolvlm",
    "idefics3": "smolvlm",
    "gemma3": "gemma3",  # with images
    "qwen2_5_vl": "qwen2_5_vl",
}
# Models with images, of which the language model can be read: the family with their defaults.
WITH_IMAGES = {"gemma3": "gemma", "mistral3": "ministral"}
# The families of classifiers (SCORED) of these types.
CLASSIFIERS = {kind: MODEL_TYPES[kind] for kind in (*DECODERS, "bert", "modernbert")}
# Integer fields that may be 0. The others are sizes.
COUNTS = ("num_dense_layers", "num_shared_experts", "min_capacity")
# Those that count from the end where they are negative.
INDICES = ("feature_layer",)
# Names that other models' configs have for fields.
OTHER_NAMES = {
    "n_layer": "num_hidden_layers", "num_layers": "num_hidden_layers", "d_model": "hidden_size",
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "num_heads": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
}  # fmt: skip
# Families with a form in Hugging Face's files.
HF_FAMILIES = tuple(dict.fromkeys(MODEL_TYPES.values()))


class Built(NamedTuple):
    """Factory, loss and config of a model, and the name of its objective."""

    factory: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[..., Any]
    config: Any
    objective: str


def family(name: str) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(_lookup("model family", name, FAMILIES))


def build(
    name: str,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    labels: int | None = None,
) -> Built:
    """A family's factory, loss and config: a preset, or the family's defaults, with `overrides`.

    With `labels` a decoder has so many scores of sequences in place of its head; other models are
    refused.

    Raises:
      ValueError: unknown family, preset or field, with the closest known name.
    """
    module = family(name)
    config = module.Config() if preset is None else _lookup("preset", preset, module.PRESETS)
    base = name.removesuffix("_classifier")
    kinds = [kind for kind, family in MODEL_TYPES.items() if family == base]
    config = _replaced(name, config, _with_labels(overrides or {}, labels, name, kinds))
    if is_classifier(config):
        _check_classifier(name, kinds)
    return Built(
        lambda rngs: module.build(config, rngs),
        _loss(module, config),
        config,
        module.objective(config),
    )


def from_pretrained(
    folder: str | Path,
    overrides: Mapping[str, Any] | None = None,
    labels: int | None = None,
    *,
    text_only: bool = False,
) -> Pretrained:
    """The model of a Hugging Face folder, for `jaxspeed.initialize(model=...)`.

    The weights are read when an engine is initialized, straight into its shards. A decoder with
    `num_labels` in `overrides` gets new scores of sequences in place of its head.

    Args:
      folder: a local folder, or the id of a model of the hub where that can be reached.
      overrides: fields of the family's Config that are no sizes, such as dropout.
      labels: of scores of sequences in place of a decoder's head; other models are refused.
      text_only: read the language model alone of one with images, as a classifier always does.

    Raises:
      PretrainedError: lists what cannot be read or is not supported.
      ValueError: unknown field in `overrides`.
    """
    opened = PretrainedFolder(folder)
    kind = opened.config["model_type"]
    is_text = text_only or labels is not None or "num_labels" in (overrides or {})
    if text_only and kind not in WITH_IMAGES:
        raise PretrainedError(
            f"{opened.path}: model.text_only: model_type {kind!r} has no language model beside one "
            f"of images; {', '.join(WITH_IMAGES)} have"
        )
    if kind in WITH_IMAGES and (is_text or kind not in MODEL_TYPES):
        opened = LanguageModelFolder(opened, hf_form(WITH_IMAGES[kind]).LANGUAGE_MODELS[kind])
        kind = str(opened.config["model_type"])
    if kind not in MODEL_TYPES:
        fields = [field for name in HF_FAMILIES for field in hf_form(name).FIELDS]
        unread = unsupported(opened.config, fields)
        types = MODEL_TYPES | WITH_IMAGES  # a type with fields of its own is no typo
        meant = _listed(types) if unread else _suggest(kind, types)
        raise PretrainedError(
            f"{opened.path}: model_type {kind!r} is of no known family: {meant}. A model "
            "of your own reads it with a mapping table: jaxspeed.interop.pretrained. Fields of its "
            "config that no family supports:"
            f"{lines(unread) or ' none'}"
        )
    if is_scored(opened.config) and kind not in CLASSIFIERS:
        raise PretrainedError(
            f"{opened.path}: {opened.config['architectures'][0]} is not supported; of models "
            f"for sequence classification those of {', '.join(CLASSIFIERS)} are"
        )
    name = MODEL_TYPES[kind]
    module, form = family(name), hf_form(name)
    if isinstance(opened, LanguageModelFolder) and not opened.config.get("architectures"):
        opened.config["architectures"] = [form.MODEL_TYPES[kind]]
    try:
        config = form.read_config(opened.config)
    except PretrainedError as error:
        raise PretrainedError(f"{opened.path}: {error}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise PretrainedError(f"{opened.path}: config.json: {error}") from None
    there = getattr(config, "num_labels", None)
    overrides = _with_labels(overrides or {}, labels, kind, [kind])
    config = _replaced(name, config, overrides)
    initialized: tuple[str, ...] = ()
    if is_classifier(config) and there is None:
        _check_classifier(kind, [kind])
        initialized = ("score/kernel",)
        if "pad_token_id" not in overrides:
            config = dataclasses.replace(config, pad_token_id=padding_of(opened))
    elif there != getattr(config, "num_labels", None):
        raise PretrainedError(f"{opened.path}: has {there} labels, and {config.num_labels} are set")
    if hasattr(config, "vocab_size"):
        check_vocabulary(opened, config.vocab_size)
    table = form.table
    for ending, other in getattr(form, "OTHER_TABLES", {}).items():  # of tensors' names
        if any(name.endswith(ending) for name in opened.tensors):
            table = other
    return Pretrained(
        lambda rngs: module.build(config, rngs),
        FolderWeights(opened, table(config), initialized),
        _loss(module, config),
        config,
        module.objective(config),
    )


def _loss(module: ModuleType, config: Any) -> Callable[..., Any]:
    return classifier_loss if is_classifier(config) else module.loss


def _with_labels(
    overrides: Mapping[str, Any], labels: int | None, name: str, kinds: Iterable[str]
) -> Mapping[str, Any]:
    if labels is None:
        return overrides
    _check_classifier(name, kinds)
    if overrides.get("num_labels", labels) != labels:
        raise ValueError(f"num_labels is {overrides['num_labels']}, and {labels} is needed")
    return {**overrides, "num_labels": labels}


def _check_classifier(name: str, kinds: Iterable[str]) -> None:
    """Raise ValueError unless one of these model types has a classifier of sequences."""
    if DECODERS.keys().isdisjoint(kinds):
        raise ValueError(
            f"{name} has no scores of sequences in place of its head, as reward models have: they "
            "are of decoders that transformers has a sequence classifier of: "
            f"{', '.join(DECODERS)}"
        )


def known() -> dict[str, dict[str, list[str]]]:
    """By family: the model types of Hugging Face that it reads, and its presets."""
    return {
        name: {
            "model_types": [kind for kind, of in (WITH_IMAGES | MODEL_TYPES).items() if name == of],
            "presets": list(family(name).PRESETS),
        }
        for name in FAMILIES
    }


def hf_form(name: str) -> ModuleType:
    """The module with a family's form in Hugging Face's files."""
    return importlib.import_module(f"{FAMILIES[name]}_hf")


def _replaced(name: str, config: Any, overrides: Mapping[str, Any]) -> Any:
    fields = {field.name: field.name for field in dataclasses.fields(config)}
    kinds = typing.get_type_hints(type(config))
    overrides = dict(overrides)
    for key, value in overrides.items():
        _lookup(f"field of the {name} config", key, fields)
        if key in getattr(config, "PARTS", ()) and isinstance(value, Mapping):
            part = getattr(config, key)
            overrides[key] = _replaced(f"{name} {key}", part, value)
            continue
        may_be_zero = key.endswith("_id") or key in COUNTS
        is_index = key in INDICES and type(value) is int
        if not (_fits(value, kinds[key]) or is_index or (may_be_zero and _is_zero(value))):
            kind = getattr(kinds[key], "__name__", kinds[key])
            least = " of at least 1" if kind == "int" and not may_be_zero else ""
            raise ValueError(
                f"{key} of the {name} config is {value!r:.100}; it needs {kind}{least}"
            )
    return dataclasses.replace(config, **overrides)


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0


def _fits(value: Any, kind: Any) -> bool:
    """Whether a field may have the value; integers are sizes, and dataclasses may be mappings."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    kinds = typing.get_args(kind) if is_union else (kind,)
    if value is None or isinstance(value, bool | str):
        return type(value) in kinds
    if isinstance(value, int) and int in kinds:
        return 1 <= value <= LARGEST
    if isinstance(value, int | float):
        return float in kinds and abs(value) <= sys.float_info.max
    if isinstance(value, list | tuple):
        return any(typing.get_origin(each) is tuple for each in kinds)
    is_fields = isinstance(value, Mapping) or dataclasses.is_dataclass(value)
    return is_fields and any(map(dataclasses.is_dataclass, kinds))


def _lookup(what: str, name: str, table: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    raise ValueError(f"unknown {what} {name!r}: {_suggest(name, table)}")


def _suggest(name: str, known: Iterable[str]) -> str:
    other = OTHER_NAMES.get(name)
    close = [other] if other and other in known else difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return meant + _listed(known)


def _listed(known: Iterable[str]) -> str:
    return f"known are {', '.join(known)}"
