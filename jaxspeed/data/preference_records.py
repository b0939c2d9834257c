"""Records of preferences in TRL's fields: pairs of completions, or completions with a label."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxspeed.config.verdicts import shown
from jaxspeed.data.chat_formats import messages_of, template_inputs
from jaxspeed.data.chat_template import Message
from jaxspeed.errors import DataError

PreferenceFormat = Literal["preference", "unpaired"]
# The fields by which a record is recognized; a pair may have a `prompt` and a `margin`.
FIELDS: dict[PreferenceFormat, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
NAMES = ("prompt", "chosen", "rejected", "completion")
OPTIONAL = ("label", "margin")


@dataclass(frozen=True)
class Preference:
    """A prompt and its completions: the chosen and the rejected one, or one with a label.

    All are texts or all are messages. A record with an empty completion has none.
    """

    prompt: str | list[Message]
    completions: Sequence[str | list[Message]]
    values: Mapping[str, float] = field(default_factory=dict)  # label 1 or 0, margin
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def preference_format(names: Iterable[str]) -> PreferenceFormat | None:
    """The format of a record with fields of these names."""
    there = set(names)
    return next((kind for kind, fields in FIELDS.items() if there.issuperset(fields)), None)


def read_preference(record: Any, kind: PreferenceFormat) -> Preference:
    """The preference in a record of this format.

    Raises:
      DataError: it is none.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a {type(record).__name__}, not an object")
    there = {name: value for name, value in record.items() if value is not None}
    if missing := [name for name in FIELDS[kind] if name not in there]:
        has = ", ".join(map(str, there)) or "none"
        raise DataError(f"no field {' or '.join(map(shown, missing))}; its fields: {has}")
    names = FIELDS[kind] if kind == "preference" else ("completion",)
    completions = [there[name] for name in names]
    if any(map(_is_empty, completions)):
        return Preference("", ())
    prompt, values = there.get("prompt"), _values(there, kind)
    if len({isinstance(value, str) for value in completions}) > 1:
        raise DataError("chosen and rejected must both be texts, or both lists of messages")
    if isinstance(completions[0], str):
        if not isinstance(prompt, str | None):
            raise DataError(f"{' and '.join(names)} are text, but prompt is none")
        if prompt is None:
            return Preference(*_implicit(*completions), values)
        return Preference(prompt, completions, values)
    messages = [messages_of(value, name) for name, value in zip(names, completions)]
    inputs = template_inputs(there)
    if isinstance(prompt, str):
        if kind == "unpaired" or not all(_begins_with(prompt, talk) for talk in messages):
            raise DataError(
                f"prompt is text, but {' and '.join(names)} are messages, which do not repeat it"
            )
        prompt = None
    if prompt is None:
        return Preference(*_implicit(*messages), values, **inputs)
    return Preference(messages_of(prompt, "prompt"), messages, values, **inputs)


def _implicit(chosen: Any, rejected: Any) -> tuple[Any, list[Any]]:
    """The prompt that complete texts or lists of messages have in common, and the completions.

    TRL's rule: they part at the first difference, or at the last element of the shorter one; a
    space before it belongs to the completions.
    """
    same = [a == b for a, b in zip(chosen, rejected)]
    at = same.index(False) if False in same else len(same) - 1
    if False in same and at and chosen[at - 1] == " ":
        at -= 1
    return chosen[:at], [chosen[at:], rejected[at:]]


def _begins_with(prompt: str, messages: list[Message]) -> bool:
    """Whether the first message of the user is the prompt."""
    said = (m.get("content") for m in messages if m["role"] == "user")
    return next(said, None) == prompt


def _is_empty(completion: Any) -> bool:
    """Whether a completion is an empty text, or its last message says and calls nothing."""
    if isinstance(completion, str):
        return not completion
    if not isinstance(completion, list) or not completion:
        return isinstance(completion, list)
    last = completion[-1]
    said = ("content", "value", "tool_calls")
    return isinstance(last, Mapping) and not any(last.get(name) for name in said)


def _values(there: Mapping[str, Any], kind: PreferenceFormat) -> dict[str, float]:
    if kind == "unpaired":
        label = there["label"]
        if not isinstance(label, bool | np.bool_):
            raise DataError(f"label is {shown(label)}; it must be true or false")
        return {"label": float(label)}
    margin = there.get("margin")
    if margin is None:
        return {}
    is_number = isinstance(margin, int | float | np.number) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise DataError(f"margin is {shown(margin)}; it must be a number")
    return {"margin": float(margin)}
