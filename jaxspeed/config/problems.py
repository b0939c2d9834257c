"""Problems of a config, all in one ConfigError; unknown keys with the closest known name."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.config.tree import VOCABULARY, keys_in
from jaxspeed.config.verdicts import printable, shown
from jaxspeed.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One problem: the key's path, what was found, and what would work.

    `about` lists the other keys concerned: if one of those is invalid itself, this problem may
    only follow from it and is omitted.
    """

    path: str
    found: str
    works: str
    about: tuple[str, ...] = ()

    def __str__(self) -> str:
        return printable(f"{self.path}: found {self.found}. {self.works}")


def config_error(problems: Sequence[Problem], origin: str) -> ConfigError:
    """Build one error for all problems."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"{count} in {origin}:{lines}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """'Did you mean "x"?', or '' if no choice is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'Did you mean "{by_lower[near[0]]}"?' if near else ""


def unknown_key(path: str, value: Any, siblings: Sequence[str] | None = None) -> Problem:
    """Problem of an unknown key, with the nearest known one here, or the same name elsewhere."""
    section, _, key = path.rpartition(".")
    siblings = keys_in(section) if siblings is None else siblings
    hint = did_you_mean(key, siblings)
    if not hint:
        elsewhere = [known for known in VOCABULARY if known.rpartition(".")[2] == key]
        if elsewhere:
            hint = f'Did you mean "{elsewhere[0]}"?'
        elif section:
            hint = f"Keys of {section}: {', '.join(siblings)}."
    hint = hint or 'Remove it, or begin its name with "_" if it is a comment.'
    return Problem(path, f"an unknown key, set to {shown(value)}", hint)


_NEEDS = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "string_too_short": "text that is not empty",
    "too_short": "a list of more items",
    "missing": "a value: it has no default",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


# End of a location in Pydantic's errors about a mapping's key, not its value.
KEY_ITSELF = "[key]"


def from_pydantic(error: Any, prefix: str = "", siblings: Sequence[str] | None = None) -> Problem:
    """Translate one of Pydantic's error records."""
    path = prefix + ".".join(str(part) for part in error["loc"] if part != KEY_ITSELF)
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(path, value, siblings)
    if kind == "missing":
        return Problem(path, "nothing", f"Needs {_NEEDS[kind]}.")
    hint = ""
    if kind in _BOUNDS:
        bound, relation = _BOUNDS[kind]
        needs = f"a number that is {relation} {context[bound]}"
    elif kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        needs = f"one of {', '.join(shown(choice) for choice in choices)}"
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    else:
        needs = context.get("needs") or _NEEDS.get(kind) or str(error["msg"])
    hint = hint or _how_to_write(kind, value)
    return Problem(path, described(value), f"Needs {needs}. {hint}".strip())


def described(value: Any) -> str:
    """Format a value, with its type where that is ambiguous."""
    if isinstance(value, str):
        return f"the text {shown(value)}"
    if isinstance(value, dict):
        return f"the mapping {shown(value)}"
    if isinstance(value, list | tuple):
        return f"the list {shown(value)}"
    return shown(value)


def _how_to_write(kind: str, value: Any) -> str:
    if value is None:
        return "Remove the key to take its default."
    if kind in ("int_type", "float_type") and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return f"Write {value.strip()} without quotes."
    if kind == "int_type" and isinstance(value, float):
        return f"Write {round(value)}." if abs(value) < 1e18 else ""
    if kind == "bool_type" and value in (0, 1):
        return f"Write {shown(bool(value))}."
    if kind == "bool_type" and str(value).lower() in ("true", "false"):
        return f"Write {str(value).lower()} without quotes."
    if kind == "string_type" and not isinstance(value, dict | list):
        return f'Write "{value}" in quotes.' if len(shown(value)) < 40 else ""
    if kind == "list_type" and not isinstance(value, dict):
        return f"Write [{shown(value)}]."
    if kind == "model_type" and isinstance(value, bool):
        return f'Write {{"enabled": {shown(value)}}}, or the section\'s own keys.'
    return ""
