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
    """A field of both; without a default it is required. `None` is allowed where it is default."""

    theirs: str
    ours: str
    kind: type = int
    default: Any = ...


@dataclass(frozen=True)
class Fixed:
    """A field of theirs whose other values are other models; absent, it has the first value."""

    theirs: str
    values: tuple[Any, ...]


def read_fields(
    values: Mapping[str, Any], fields: Sequence[Field | Fixed], where: str = "config.json"
) -> dict[str, Any]:
    """The fields of ours.

    Raises:
      PretrainedError: lists what is missing, of a wrong type, or not supported.
    """
    found: dict[str, Any] = {}
    problems = []
    for field in fields:
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
        elif field.kind is int and isinstance(value, int) and value < 1:
            problems.append(f"{field.theirs} is {value}, which is not positive")
        elif field.kind is int and isinstance(value, int) and value > LARGEST:
            problems.append(f"{field.theirs} is {value}; no size is over {LARGEST:,}")
        elif field.kind is float and value is not None and value < 0:
            problems.append(f"{field.theirs} is {value}, which is negative")
        else:
            found[field.ours] = value
    if problems:
        raise PretrainedError(f"{where}:{lines(problems)}")
    return found


def write_fields(config: Any, fields: Sequence[Field | Fixed]) -> dict[str, Any]:
    """The fields of theirs."""
    return {
        f.theirs: f.values[0] if isinstance(f, Fixed) else getattr(config, f.ours) for f in fields
    }


def _is(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        if isinstance(value, int):
            return abs(value) <= LARGEST
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind)
