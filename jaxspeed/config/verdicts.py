"""Verdict of a config key: honoured, harmless, approximated or refused, and how it is chosen."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Verdict = Literal["honoured", "harmless", "approximated", "refused"]


@dataclass(frozen=True)
class Entry:
    """Verdict and sentence of one config key.

    A refused key with a value in `off` is a no-op, and accepted. `when` names another key and
    its values for which this key has an effect, `unless` one and its values for which it has none.
    """

    path: str
    verdict: Verdict
    sentence: str
    off: tuple[Any, ...] = ()
    when: tuple[str, tuple[Any, ...]] | None = None
    off_if: Callable[[Any], bool] | None = None
    unless: tuple[str, tuple[Any, ...]] | None = None

    def is_off(self, value: Any) -> bool:
        """Whether this value is a no-op."""
        if self.off_if is not None:
            return self.off_if(value)
        return any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.off
        )


class ExplainedKey(NamedTuple):
    """Explanation of one key, by `explain_config`."""

    key: str
    value: Any
    verdict: Verdict
    sentence: str


def rows(
    section: str,
    verdict: Verdict,
    sentences: dict[str, str],
    *,
    when: tuple[str, tuple[Any, ...]] | None = None,
    unless: tuple[str, tuple[Any, ...]] | None = None,
) -> Iterable[Entry]:
    """Entries of one section with the same verdict, one sentence each."""
    prefix = f"{section}." if section else ""
    return [
        Entry(prefix + key, verdict, text, when=when, unless=unless)
        for key, text in sentences.items()
    ]


def alike(
    section: str,
    verdict: Verdict,
    sentence: str,
    keys: str,
    *,
    when: tuple[str, tuple[Any, ...]] | None = None,
) -> Iterable[Entry]:
    """Entries of one section with the same verdict and sentence; `keys` are separated by spaces."""
    return rows(section, verdict, dict.fromkeys(keys.split(), sentence), when=when)


def refused(path: str, sentence: str, *off: Any) -> Entry:
    """Entry of a key that is refused unless its value is in `off`."""
    return Entry(path, "refused", sentence, off=off)


def refused_section(path: str, sentence: str) -> Entry:
    """Entry of a free-form section that is refused if it is enabled."""
    return Entry(path, "refused", sentence, off_if=is_switched_off)


def is_switched_off(section: Any) -> bool:
    """Whether a free-form section is disabled.

    By its own `enabled`; without one, every `enabled` below must be false, and a section without
    any is enabled if it is present.
    """
    if not isinstance(section, dict) or not section:
        return True
    if "enabled" in section:
        return section["enabled"] is False
    below = [value for value in section.values() if isinstance(value, dict)]
    return len(below) == len(section) and all(is_switched_off(value) for value in below)


def judge(entry: Entry, value: Any, read: Callable[[str], Any]) -> tuple[Verdict, str]:
    """Choose the verdict on a key with this value; `read` returns other keys' values by path."""
    for switch, is_idle in _switches(entry):
        if is_idle(read(switch)):
            return "harmless", f"Ignored while {switch} is {shown(read(switch))}."
    if entry.verdict == "refused" and entry.is_off(value):
        return "harmless", f"A no-op at this value; others are refused: {entry.sentence}"
    return entry.verdict, entry.sentence


def _switches(entry: Entry) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """Yield the keys on which this one depends, each with a test for when it has no effect."""
    if entry.when is not None:
        switch, needed = entry.when
        yield switch, lambda value: value not in needed
    if entry.unless is not None:
        switch, idle = entry.unless
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
