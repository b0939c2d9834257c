"""Fields of a config.json and the fields of a family's `Config`, translated in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.mapping import lines

LARGEST = 2**31 - 1  # of a size
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Field:
    """A field of both; without a default it is required. `None` is allowed where it is default.

    An integer is at least `least`.
    """

    theirs: str
    ours: str
    kind: type = int
    default: Any = ...
    least: int = 1


@dataclass(frozen=True)
class Fixed:
    """A field of theirs whose other values are other models; absent, it has the first value."""

    theirs: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Read:
    """A field of theirs that a family reads by code of its own."""

    theirs: str


Fields = Sequence[Field | Fixed | Read]


def read_fields(
    values: Mapping[str, Any], fields: Fields, where: str = "config.json"
) -> dict[str, Any]:
    """The fields of ours.

    Raises:
      PretrainedError: lists what is missing, of a wrong type, or not supported.
    """
    ours: dict[str, Any] = {}
    problems = []
    for field in fields:
        if isinstance(field, Read):
            continue
        value = values.get(field.theirs, ...)
        if isinstance(field, Fixed):
            if value is not ... and value not in field.values:
                known = " or ".join(repr(v) for v in field.values)
                problems.append(f"{field.theirs} is {value!r}; only {known} is supported")
            continue
        if value is ...:
            value = field.default
        if value is ...:
            problems.append(f"{field.theirs} is missing: {_KINDS[field.kind]}")
        elif not _is(value, field.kind) and value != field.default:
            problems.append(f"{field.theirs} is {value!r}, which is not {_KINDS[field.kind]}")
        elif field.kind is int and isinstance(value, int) and value < field.least:
            what = "not positive" if field.least else "negative"
            problems.append(f"{field.theirs} is {value}, which is {what}")
        elif field.kind is int and isinstance(value, int) and value > LARGEST:
            problems.append(f"{field.theirs} is {value}; no size is over {LARGEST:,}")
        elif field.kind is float and value is not None and value < 0:
            problems.append(f"{field.theirs} is {value}, which is negative")
        else:
            ours[field.ours] = value
    if problems:
        raise PretrainedError(f"{where}:{lines(problems)}")
    return ours


def write_fields(config: Any, fields: Fields) -> dict[str, Any]:
    """The fields of theirs."""
    return {
        f.theirs: f.values[0] if isinstance(f, Fixed) else getattr(config, f.ours)
        for f in fields
        if not isinstance(f, Read)
    }


# Fields that change no function of the parameters: of tokens, files, outputs and dropout.
NEUTRAL = frozenset({
    "_name_or_path", "_attn_implementation", "architectures",
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "auto_map",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout",
    "decoder_start_token_id", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "hidden_dropout_prob",
    "id2label", "is_decoder", "label2id", "max_length", "model_type",
    "num_labels", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id",
    "prefix", "pretraining_tp", "problem_type", "pruned_heads", "quantization_config",
    "resid_pdrop", "return_dict", "sep_token_id", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "suppress_tokens",
    "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version",
    "unk_token_id", "use_bfloat16", "use_cache",
})  # fmt: skip


def unsupported(values: Mapping[str, Any], fields: Fields) -> list[str]:
    """The fields of a config that are set and that no family reads with such a value."""
    read = {f.theirs for f in fields if not isinstance(f, Fixed)} | NEUTRAL
    fixed: dict[str, list[Any]] = {}
    for f in fields:
        if isinstance(f, Fixed):
            fixed.setdefault(f.theirs, []).extend(f.values)
    return [
        f"{name} = {value!r:.60}"
        for name, value in values.items()
        if name not in read and value not in (None, False, [], {}, *fixed.get(name, ()))
    ]


def _is(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        if isinstance(value, int):
            return abs(value) <= LARGEST
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind)
