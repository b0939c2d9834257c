"""What becomes of each key: the form of a row of the vocabulary, and how one is judged."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Verdict = Literal["honoured", "harmless", "approximated", "refused"]


@dataclass(frozen=True)
class Entry:
    """One row of the vocabulary.

    `off` holds the values by which a refused key asks for nothing, and is then accepted. `when`
    names a switch and the values of it under which the key says anything at all, `unless` one and
    the values under which it says nothing.
    """

    path: str
    verdict: Verdict
    sentence: str
    off: tuple[Any, ...] = ()
    when: tuple[str, tuple[Any, ...]] | None = None
    off_if: Callable[[Any], bool] | None = None
    unless: tuple[str, tuple[Any, ...]] | None = None

    def is_off(self, value: Any) -> bool:
        """Whether this value asks for nothing."""
        if self.off_if is not None:
            return self.off_if(value)
        return any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.off
        )


class ExplainedKey(NamedTuple):
    """What `explain_config` says of one key."""

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
    """Rows of one section and verdict, a sentence each."""
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
    """Rows of one section that share verdict and sentence; `keys` is a list in words."""
    return rows(section, verdict, dict.fromkeys(keys.split(), sentence), when=when)


def refused(path: str, sentence: str, *off: Any) -> Entry:
    """A key that is refused unless it holds one of the values `off`."""
    return Entry(path, "refused", sentence, off=off)


def refused_section(path: str, sentence: str) -> Entry:
    """A section of free form that is refused when it is switched on."""
    return Entry(path, "refused", sentence, off_if=is_switched_off)


def is_switched_off(section: Any) -> bool:
    """Whether a section of free form asks for nothing.

    Its own `enabled` decides; without one, every `enabled` below must be false, and a section that
    has none at all is on by being there.
    """
    if not isinstance(section, dict) or not section:
        return True
    if "enabled" in section:
        return section["enabled"] is False
    below = [value for value in section.values() if isinstance(value, dict)]
    return len(below) == len(section) and all(is_switched_off(value) for value in below)


def judge(entry: Entry, value: Any, read: Callable[[str], Any]) -> tuple[Verdict, str]:
    """The verdict on a key that holds `value`; `read` gives other keys' values by path."""
    for switch, is_idle in _switches(entry):
        if is_idle(read(switch)):
            return "harmless", f"Says nothing while {switch} is {shown(read(switch))}."
    if entry.verdict == "refused" and entry.is_off(value):
        return "harmless", f"Asks for nothing here. Otherwise refused: {entry.sentence}"
    return entry.verdict, entry.sentence


def _switches(entry: Entry) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """The keys that decide whether this one says anything, each with when it does not."""
    if entry.when is not None:
        switch, needed = entry.when
        yield switch, lambda value: value not in needed
    if entry.unless is not None:
        switch, idle = entry.unless
        yield switch, lambda value: value in idle


def printable(text: str) -> str:
    """A text on one line, whatever characters it has."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def shortened(text: str, most: int = 60) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """A value as a config file would write it, cut to a readable length."""
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    try:
        text = printable(f'"{value}"' if isinstance(value, str) else repr(value))
    except (ValueError, RecursionError):  # Python does not print numbers of over 4300 digits
        return f"a {type(value).__name__} too large to show"
    return shortened(text)
