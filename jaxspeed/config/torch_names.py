"""Translation of DeepSpeed's regexes over torch's parameter names to path patterns.

| regex | path patterns |
|---|---|
| `.*\\.o_proj\\.weight$` | `o_proj` |
| `.*\\.[qkv]_proj$` | `q_proj`, `k_proj`, `v_proj` |
| `.*\\.h\\.\\d+\\.mlp\\.(up|gate)` | `**/h/*/mlp/up`, `**/h/*/mlp/gate` |

A trailing `weight` is removed, since a spec applies to a module, with its bias. A regex that no
path pattern can express is not translated.
"""

import re
from itertools import product

MOST = 64  # spellings of one regex
ANY, ONE, END, DOT = "\0", "\1", "\2", "/"  # any text, one segment, the end, a separator
WORD = re.compile(r"[A-Za-z0-9_-]")


def path_patterns(regex: str) -> list[str] | None:
    """Translate a regex to path patterns; None if that is not possible."""
    try:
        spellings = _Reader(regex.removeprefix("^")).read()
        return list(dict.fromkeys(map(_as_pattern, spellings)))
    except (_Untranslatable, RecursionError):
        return None


def looks_like_regex(text: str) -> bool:
    """Whether a text is a regex where a path pattern belongs."""
    return any(char in text for char in "\\^$|()[]+") or ".*" in text


def example_pattern(regex: str) -> str:
    """Example of a path pattern, for a regex that cannot be translated."""
    names = [name for name in re.findall(r"[A-Za-z_]\w+", regex) if name not in ("weight", "bias")]
    return names[-1] if names else "blocks/*/mlp/up"


class _Untranslatable(Exception):
    """No path pattern can express the regex."""


class _Reader:
    """Parser of a regex into the texts that it matches, with the marks ANY, ONE, END and DOT."""

    def __init__(self, regex: str) -> None:
        self.rest = regex

    def read(self) -> list[str]:
        spellings = self._alternatives()
        if self.rest:
            raise _Untranslatable
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
                raise _Untranslatable
        return spellings

    def _item(self) -> list[str]:
        for text, mark in (
            (r"\.\*\??|\.\+\??", ANY),
            (r"(?:\\d|\\w|\[0-9\]|\[\^\\?\.\])[+*]", ONE),
            (r"\\\.|\.", DOT),
            (r"\$$|\$(?=[|)])|\\Z", END),
        ):
            if match := re.match(text, self.rest):
                self.rest = self.rest[match.end() :]
                return self._once([mark])
        if self._takes("(?:") or self._takes("("):
            inner = self._alternatives()
            if not self._takes(")"):
                raise _Untranslatable
            return self._once(inner)
        if match := re.match(r"\[([A-Za-z0-9_-]+)\]", self.rest):
            self.rest = self.rest[match.end() :]
            return self._once(_members(match[1]))
        if match := re.match(r"\\?(" + WORD.pattern + ")", self.rest):
            if match[0].startswith("\\") and match[1].isalnum():  # a class, such as \d, or \b
                raise _Untranslatable
            self.rest = self.rest[match.end() :]
            return self._once([match[1]])
        raise _Untranslatable

    def _once(self, spellings: list[str]) -> list[str]:
        """Return the spellings, unless a quantifier follows."""
        if self.rest[:1] and self.rest[0] in "?*+{":
            raise _Untranslatable
        return spellings

    def _takes(self, text: str) -> bool:
        taken = self.rest.startswith(text)
        self.rest = self.rest.removeprefix(text)
        return taken


def _members(inside: str) -> list[str]:
    """Characters of a class: a, b, c and _ for [a-c_]."""
    members: list[str] = []
    for low, high in re.findall(r"(.)(?:-(.))?", inside):
        members += map(chr, range(ord(low), ord(high or low) + 1))
    if not members or not all(map(WORD.match, members)):
        raise _Untranslatable
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
            raise _Untranslatable
        else:
            starts, ends = not part.startswith(ANY), not part.endswith(ANY)
            segments += [] if starts else ["**"]
            segments.append(f"{'' if starts else '*'}{inner}{'' if ends else '*'}")
    while len(segments) > 1 and segments[-1] in ("weight", "**"):
        segments.pop()
    if len(segments) == 2 and segments[0] == "**":
        segments = segments[1:]  # a pattern of one segment may match anywhere
    return "/".join(segments)
