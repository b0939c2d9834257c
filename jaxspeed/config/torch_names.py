"""From DeepSpeed's regexes over torch's parameter names to path patterns.

| regex | path patterns |
|---|---|
| `.*\\.o_proj\\.weight$` | `o_proj` |
| `.*\\.[qkv]_proj$` | `q_proj`, `k_proj`, `v_proj` |
| `.*\\.h\\.\\d+\\.mlp\\.(up|gate)` | `**/h/*/mlp/up`, `**/h/*/mlp/gate` |

A trailing `weight` goes, since a spec speaks of a module: its bias is cut with it. What a path
pattern cannot say is not translated.
"""

import re
from itertools import product

MOST = 64  # spellings of one regex
ANY, ONE, END, DOT = "\0", "\1", "\2", "/"  # any text, one whole segment, the end, a separator
WORD = re.compile(r"[A-Za-z0-9_-]")


def path_patterns(regex: str) -> list[str] | None:
    """The path patterns for a regex, or None when they cannot be told."""
    try:
        spellings = _Reader(regex.removeprefix("^")).read()
        return list(dict.fromkeys(map(_as_pattern, spellings)))
    except (_Untold, RecursionError):
        return None


def looks_like_regex(text: str) -> bool:
    """Whether somebody wrote a regex where a path pattern belongs."""
    return any(char in text for char in "\\^$|()[]+") or ".*" in text


def example_pattern(regex: str) -> str:
    """A path pattern in the spirit of a regex that is not translated."""
    names = [name for name in re.findall(r"[A-Za-z_]\w+", regex) if name not in ("weight", "bias")]
    return names[-1] if names else "blocks/*/mlp/up"


class _Untold(Exception):
    """The regex says what no path pattern can."""


class _Reader:
    """A regex as the texts that it spells, in which ANY, ONE, END and DOT stand for themselves."""

    def __init__(self, regex: str) -> None:
        self.rest = regex

    def read(self) -> list[str]:
        spellings = self._alternatives()
        if self.rest:
            raise _Untold
        return spellings

    def _alternatives(self) -> list[str]:
        spellings = self._sequence()
        while self._takes("|"):
            spellings += self._sequence()
        return spellings

    def _sequence(self) -> list[str]:
        spellings = [""]
        while self.rest and self.rest[0] not in "|)":
            spellings = [a + b for a, b in product(spellings, self._item())]
            if len(spellings) > MOST:
                raise _Untold
        return spellings

    def _item(self) -> list[str]:
        for text, mark in (
            (r"\.\*\??|\.\+\??", ANY),
            (r"(?:\\d|\\w|\[0-9\]|\[\^\\?\.\])[+*]", ONE),
            (r"\\\.|\.", DOT),
            (r"\$$|\$(?=[|)])|\\Z", END),
        ):
            if found := re.match(text, self.rest):
                self.rest = self.rest[found.end() :]
                return self._once([mark])
        if self._takes("(?:") or self._takes("("):
            inner = self._alternatives()
            if not self._takes(")"):
                raise _Untold
            return self._once(inner)
        if found := re.match(r"\[([A-Za-z0-9_-]+)\]", self.rest):
            self.rest = self.rest[found.end() :]
            return self._once(_members(found[1]))
        if found := re.match(r"\\?(" + WORD.pattern + ")", self.rest):
            if found[0].startswith("\\") and found[1].isalnum():  # a class, such as \d, or \b
                raise _Untold
            self.rest = self.rest[found.end() :]
            return self._once([found[1]])
        raise _Untold

    def _once(self, spellings: list[str]) -> list[str]:
        """What was read, if it is not to be repeated."""
        if self.rest[:1] and self.rest[0] in "?*+{":
            raise _Untold
        return spellings

    def _takes(self, text: str) -> bool:
        taken = self.rest.startswith(text)
        self.rest = self.rest.removeprefix(text)
        return taken


def _members(inside: str) -> list[str]:
    """The characters of a class, [a-c_] as a, b, c and _."""
    members: list[str] = []
    for low, high in re.findall(r"(.)(?:-(.))?", inside):
        members += map(chr, range(ord(low), ord(high or low) + 1))
    if not members or not all(map(WORD.match, members)):
        raise _Untold
    return members


def _as_pattern(spelling: str) -> str:
    segments: list[str] = []
    parts = spelling.removesuffix(END).split(DOT)
    for i, part in enumerate(parts):
        first, last = i == 0, i == len(parts) - 1
        inner = part.removeprefix(ANY) if first else part
        inner = inner.removesuffix(ANY) if last else inner
        if part == ANY:
            segments.append("**")
        elif part == ONE:
            segments.append("*")
        elif not inner or any(mark in inner for mark in (ANY, ONE, END)):
            raise _Untold
        else:
            starts, ends = not part.startswith(ANY), not part.endswith(ANY)
            segments += [] if starts else ["**"]
            segments.append(f"{'' if starts else '*'}{inner}{'' if ends else '*'}")
    while len(segments) > 1 and segments[-1] in ("weight", "**"):
        segments.pop()
    if len(segments) == 2 and segments[0] == "**":
        segments = segments[1:]  # a pattern of one segment may match anywhere
    return "/".join(segments)
