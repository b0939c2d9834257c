"""What crosses between the tests and the references: JSON, its arrays in a safetensors file.

Both sides import this file, so it imports neither JAX nor torch.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# What `make references` installs; a test that needs one that is absent is skipped by its name.
PACKAGES = (
    "torch",
    "safetensors",
    "transformers",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "trl",
    "lm_eval",
)
_ARRAY = "$array"


def write(
    path: Path,
    value: Any,
    array_type: type | tuple[type, ...],
    save: Callable[[dict[str, Any], Path], None],
) -> None:
    """Write `value` to `path`.json, and its arrays, if any, by `save` to `path`.safetensors."""
    arrays: dict[str, Any] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, array_type):
            arrays[name := str(len(arrays))] = x
            return {_ARRAY: name}
        if isinstance(x, Mapping):
            if _ARRAY in x or not all(isinstance(key, str) for key in x):
                raise TypeError(f"JSON has no dict with these keys: {list(x)}")
            return {key: plain(each) for key, each in x.items()}
        if isinstance(x, list | tuple):
            return [plain(each) for each in x]
        return os.fspath(x) if isinstance(x, os.PathLike) else x

    path.with_suffix(".json").write_text(json.dumps(plain(value)))
    if arrays:
        save(arrays, path.with_suffix(".safetensors"))


def read(path: Path, load: Callable[[Path], Mapping[str, Any]]) -> Any:
    """What `write` wrote; tuples are lists, and paths are text."""
    file = path.with_suffix(".safetensors")
    arrays = load(file) if file.exists() else {}

    def restored(x: dict[str, Any]) -> Any:
        return arrays[x[_ARRAY]] if _ARRAY in x else x

    return json.loads(path.with_suffix(".json").read_text(), object_hook=restored)
