"""A config key's verdict and sentence, declared with its default in the field of its section.

    loss_scale: NonNegative = honoured(0.0, "0 is the dynamic scale, any other number a fixed one.")

The JSON Schema, the table in docs/config.md and `explain_config` are generated from these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import Field

Verdict = Literal["honoured", "approximated", "harmless", "ignored", "refused"]
Switch = tuple[str, tuple[Any, ...]]  # the path of a key, and some of its values


@dataclass(frozen=True)
class Key:
    """Verdict and sentence of one config key.

    A refused or approximated key is harmless with a value that `is_off` calls a no-op. `when` names
    another key and its values for which this key has an effect, `unless` one and its values for
    which it has none. While another key has the values of `differs`, the key is approximated, for
    the reason there.
    """

    verdict: Verdict
    sentence: str
    is_off: Callable[[Any], bool]
    when: Switch | None = None
    unless: Switch | None = None
    differs: tuple[Switch, str] | None = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Describe the key in its JSON Schema, where Pydantic calls it."""
        schema["description"] = f"{self.verdict}: {self.sentence}"


def _declared(
    verdict: Verdict,
    default: Any,
    sentence: str,
    *off: Any,
    when: Switch | None = None,
    unless: Switch | None = None,
    is_off: Callable[[Any], bool] | None = None,
    differs: tuple[Switch, str] | None = None,
) -> Any:
    """Field with this default and verdict; off at `off`, and at the default unless approximated."""
    no_ops = off if verdict == "approximated" else (default, *off)

    def is_no_op(value: Any) -> bool:
        return any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in no_ops
        )

    key: Any = Key(verdict, sentence, is_off or is_no_op, when, unless, differs)
    return Field(default, json_schema_extra=key)


honoured = partial(_declared, "honoured")
approximated = partial(_declared, "approximated")
harmless = partial(_declared, "harmless")
ignored = partial(_declared, "ignored")
refused = partial(_declared, "refused")


REMOVED = "Removed in DeepSpeed 0.19.8"
"""Start of a sentence on a key on which DeepSpeed raises since that version."""


def refused_section(sentence: str, *, is_off: Callable[[Any], bool] | None = None) -> Any:
    """Field of a free-form section that is refused if it is enabled, by default by a switch.

    A switch is an `enabled` of its own, or else anywhere in it, and false if it is missing.
    """
    return refused(None, sentence, is_off=is_off or is_switched_off)


def is_switched_off(section: Any) -> bool:
    """Whether no `enabled` of a free-form section is true; its own overrides those below."""
    if not isinstance(section, dict):
        return True
    if "enabled" in section:
        return section["enabled"] in (False, "auto", None)
    return all(is_switched_off(value) for value in section.values())


def has_no_part(section: Any) -> bool:
    """Whether a section, or else each section in it, is switched off."""
    parts = section.values() if isinstance(section, dict) else ()
    sections = [part for part in parts if isinstance(part, dict)]
    return is_switched_off(section) or (bool(sections) and all(map(is_switched_off, sections)))


def is_absent(section: Any) -> bool:
    """Whether a section that is enabled by its presence is empty, or switched off."""
    return not section or (isinstance(section, dict) and section.get("enabled") is False)


class ExplainedKey(NamedTuple):
    """Explanation of one key, by `explain_config`."""

    key: str
    value: Any
    verdict: Verdict
    sentence: str


def judge(key: Key, value: Any, read: Callable[[str], Any]) -> tuple[Verdict, str]:
    """Choose the verdict on a key with this value; `read` returns other keys' values by path."""
    for switch, is_idle in _switches(key):
        if is_idle(read(switch)):
            return "harmless", f"Ignored while {switch} is {shown(read(switch))}."
    if key.verdict in ("refused", "approximated") and key.is_off(value):
        return "harmless", f"A no-op at this value; others are {key.verdict}: {key.sentence}"
    if key.differs is not None and not key.is_off(value):
        (switch, values), reason = key.differs
        if read(switch) in values:
            return "approximated", f"{key.sentence} {reason}"
    return key.verdict, key.sentence


def _switches(key: Key) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """Yield the keys on which this one depends, each with a test for when it has no effect."""
    if key.when is not None:
        switch, needed = key.when
        yield switch, lambda value: value not in needed
    if key.unless is not None:
        switch, idle = key.unless
        yield switch, lambda value: value in idle


def printable(text: str) -> str:
    """Escape a text to one printable line."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def shortened(text: str, most: int = 60) -> str:
    """Truncate a text to so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """Format a value as in a config file, truncated to a readable length."""
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    try:
        text = printable(f'"{value}"' if isinstance(value, str) else repr(value))
    except (ValueError, RecursionError):  # Python does not print numbers of over 4300 digits
        return f"a {type(value).__name__} too large to show"
    return shortened(text)
