"""Records as JSON: one a line, each number plain, and none that JSON does not have."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# JSON has no such numbers; protobuf's JSON writes them so, and float() reads them.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """Numbers of NumPy and JAX as Python's own; mappings and sequences too."""
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
    """One line; numbers that are not finite become the texts NaN, Infinity, -Infinity."""
    return json.dumps(_encoded(plain(record)), allow_nan=False, ensure_ascii=False)


def from_json(line: str) -> dict[str, Any]:
    """What `to_json` was given. ValueError where the line is not one of its."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"not a record: {line[:80]!r}")
    return {key: _decoded(value) for key, value in record.items()}


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file that a JsonlSink writes; a line that is just being written is left."""
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
