"""Numbers of labels in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Fixed

PROBLEMS = Fixed("problem_type", (None, "single_label_classification", "regression"))


def count_labels(values: Mapping[str, Any]) -> int:
    names = values.get("id2label")
    count = values.get("num_labels", 2) if names is None else len(names)
    if type(count) is not int:
        raise PretrainedError(f"config.json: num_labels is {count!r}, which is not an integer")
    return count


def write_labels(count: int) -> dict[str, Any]:
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
