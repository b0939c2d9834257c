"""Problems of a config, all in one ConfigError; unknown keys with the closest known name."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxspeed.config.suggestions import REMOVE, Fix, suggest
from jaxspeed.config.tree import PARAMS, VOCABULARY, keys_in, read, section_at
from jaxspeed.config.types import Coercing, Lenient
from jaxspeed.config.verdicts import printable, shown
from jaxspeed.errors import ConfigError
from jaxspeed.near_words import closest, did_you_mean


@dataclass(frozen=True)
class Problem:
    """One problem: the key's path, what was found, and what would work.

    `about` lists the other keys concerned: if one of those is invalid itself, this problem may
    only follow from it and is omitted. `fix` removes it, where there is one answer.
    """

    path: str
    found: str
    works: str
    about: tuple[str, ...] = ()
    fix: Fix = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return printable(f"{self.path}: found {self.found}. {self.works}")


def config_error(problems: Sequence[Problem], origin: str, advice: str = "") -> ConfigError:
    """Build one error for all problems, with advice on all of them."""
    lines = _lines(problems)
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    text = "".join(f"\n  - {line}" for line in lines)
    return ConfigError(f"{count} in {origin}:{text}" + (f"\n{advice}" if advice else ""))


def _lines(problems: Sequence[Problem]) -> list[str]:
    """A line for each problem; one for all unknown keys of a section with the same remedy."""
    groups: dict[Any, list[Problem]] = {}
    for problem in problems:
        section = problem.path.rpartition(".")[0]
        is_unknown = section and problem.found.startswith(_UNKNOWN)
        groups.setdefault((section, problem.works) if is_unknown else problem, []).append(problem)
    return [str(group[0] if len(group) == 1 else _joined(group)) for group in groups.values()]


def _joined(group: Sequence[Problem]) -> Problem:
    names = [problem.path.rpartition(".")[2] for problem in group[1:]]
    values = [problem.found.removeprefix(_UNKNOWN) for problem in group]
    path, actual = ", ".join([group[0].path, *names]), f"unknown keys, set to {', '.join(values)}"
    return Problem(path, actual, group[0].works)


_UNKNOWN = "an unknown key, set to "


def unknown_name(path: str, name: str, known: Iterable[str], more: str = "") -> Problem:
    """Problem of a name that is none of these, with the one that is meant."""
    known = [*known]
    works = f"Needs one of {', '.join(known)}{more}. {did_you_mean(name, known)}".strip()
    near = closest(name, known)
    return Problem(path, shown(name), works, fix={path: near} if near else {})


def unknown_key(
    path: str, value: Any, siblings: Sequence[str] | None = None, tree: Any = None
) -> Problem:
    """Problem of an unknown key, with the key that is meant."""
    section, _, key = path.rpartition(".")
    actual = f"{_UNKNOWN}{shown(value)}"
    if meant := suggest(path, value, tree):
        return Problem(path, actual, meant.text, fix=meant.fix)
    siblings = keys_in(section) if siblings is None else siblings
    if near := did_you_mean(key, siblings):
        return Problem(path, actual, near)
    if not section:
        works = 'Remove it, or begin its name with "_" if it is a comment.'
        return Problem(path, actual, works)
    types, section_keys = PARAMS.get(section, {}), read(tree, section) or ()
    others = [
        name for name, params in types.items() if {key, *section_keys} <= params.model_fields.keys()
    ]
    if others and section == "scheduler.params":
        return Problem(path, actual, f"It is a parameter of {' and '.join(others)}.")
    kind = section_at(section)
    is_checked = types or (kind is not None and issubclass(kind, Coercing))
    fix = {path: REMOVE} if is_checked else {}
    if is_checked and len(siblings) > _MANY:
        return Problem(path, actual, "Remove it.", fix=fix)
    return Problem(path, actual, f"Keys of {section}: {', '.join(siblings)}.", fix=fix)


def _in_deepspeed(section: str) -> str:
    """What DeepSpeed does with an unknown key of a section; '' for a section that it has not."""
    kind = Coercing if section in PARAMS else section_at(section)
    if kind is None or not issubclass(kind, Coercing | Lenient):
        return ""
    is_ignored = issubclass(kind, Lenient) or section == "expert_parallel"
    return " DeepSpeed ignores it." if is_ignored else " DeepSpeed refuses it too."


_MANY = 30  # keys of a section, which nobody reads in an error


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
    "missing": "a value: it has no default",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


# Parts of locations in Pydantic's errors that are no key: it is about a mapping's key, not its
# value, or about one of two types (`types.AutoOrTexts`).
_NO_KEYS = ("[key]", "[word]", "[other]")


def from_pydantic(
    error: Any, prefix: str = "", siblings: Sequence[str] | None = None, tree: Any = None
) -> Problem:
    """Translate one of Pydantic's error records about a config, `tree`."""
    path = prefix + ".".join(str(part) for part in error["loc"] if part not in _NO_KEYS)
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        problem = unknown_key(path, value, siblings, tree)
        return replace(problem, works=problem.works + _in_deepspeed(path.rpartition(".")[0]))
    if kind == "missing":
        return Problem(path, "nothing", f"Needs {_NEEDS[kind]}.")
    hint = ""
    fix: list[Any] = []
    if kind in _BOUNDS:
        bound, relation = _BOUNDS[kind]
        needs = f"a number that is {relation} {context[bound]}"
    elif kind == "too_short":
        least = context["min_length"]
        needs = f"a list of at least {least} item{'' if least == 1 else 's'}"
    elif kind == "literal_error":
        choices = re.findall(r"'([^']*)'|(-?\d+)", context["expected"])
        choices = [text or int(number) for text, number in choices]
        needs = f"one of {', '.join(shown(choice) for choice in choices)}"
        words = [choice for choice in choices if isinstance(choice, str)]
        near = closest(value, words) if isinstance(value, str) else None
        hint, fix = (f'Did you mean "{near}"?', [near]) if near else ("", [])
    else:
        needs = context.get("needs") or _NEEDS.get(kind) or str(error["msg"])
    if not hint:
        hint, fix = _how_to_write(kind, value)
    section = section_at(path) if kind == "model_type" and not hint else None
    if section is not None and path in _ALONE and isinstance(value, str | int):
        hint = f'Write {{"{next(iter(section.model_fields))}": {shown(value)}}}.'
    elif section is not None and len(section.model_fields) < _MANY:
        hint = f"Keys of {path}: {', '.join(section.model_fields)}."
    if isinstance(value, list) and f"{path}s" in VOCABULARY:
        hint = f"{path}s is a list."
    fixes = {path: fix[0]} if fix else {}
    return Problem(path, described(value), f"Needs {needs}. {hint}".strip(), fix=fixes)


# Sections in whose place people write a value of their first key.
_ALONE = ("model", "optimizer", "scheduler", "objective", "lora", "model.quantize")


def described(value: Any) -> str:
    """Format a value, with its type where that is ambiguous."""
    if isinstance(value, str):
        return f"the text {shown(value)}"
    if isinstance(value, dict):
        return f"the mapping {shown(value)}"
    if isinstance(value, list | tuple):
        return f"the list {shown(value)}"
    return shown(value)


def _how_to_write(kind: str, value: Any) -> tuple[str, list[Any]]:
    """Text on how to write a value, and the new value, or none if there is not one answer."""
    if value is None:
        return "Remove the key to take its default.", [REMOVE]
    if kind in ("int_type", "float_type") and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return "", []
        if math.isfinite(number) and (kind == "float_type" or number.is_integer()):
            new = int(number) if number.is_integer() else number
            return f"Write {value.strip()} without quotes.", [new]
        return "", []
    if kind == "int_type" and isinstance(value, float):
        return (f"Write {round(value)}.", []) if 0.5 < abs(value) < 1e18 else ("", [])
    if kind == "bool_type" and value in (0, 1):
        return f"Write {shown(bool(value))}.", [bool(value)]
    if kind == "bool_type" and str(value).lower() in ("true", "false"):
        text = str(value).lower()
        return f"Write {text} without quotes.", [text == "true"]
    if kind == "string_type" and not isinstance(value, dict | list):
        return (f'Write "{value}" in quotes.', [str(value)]) if len(shown(value)) < 40 else ("", [])
    if kind == "list_type" and not isinstance(value, dict):
        return f"Write [{shown(value)}].", [[value]]
    if kind == "model_type" and isinstance(value, bool):
        written = f'Write {{"enabled": {shown(value)}}}, or the section\'s own keys.'
        return written, [{"enabled": value}]
    return "", []
