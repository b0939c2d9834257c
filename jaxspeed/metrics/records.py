"""Metric records as JSON lines: plain numbers, with NaN and infinities as strings."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# JSON lacks these numbers; protobuf's JSON writes them as these strings, and float() reads them.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """NumPy and JAX scalars as Python numbers, also inside of mappings and sequences."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a record holds numbers, texts, lists and mappings, not {type(value)}")


def to_json(record: Mapping[str, Any]) -> str:
    """One line; non-finite numbers become the strings NaN, Infinity, -Infinity."""
    return json.dumps(_encoded(plain(record)), allow_nan=False, ensure_ascii=False)


def from_json(line: str) -> dict[str, Any]:
    """The record of a line: the inverse of `to_json`. ValueError if it is no record."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"not a record: {line[:80]!r}")
    return {key: _decoded(value) for key, value in record.items()}


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JsonlSink's file, without an incomplete last line."""
    records = []
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                records.append(from_json(line))
    return records


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _encoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_encoded(inner) for inner in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    return value
