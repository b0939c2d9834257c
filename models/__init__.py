"""Reference models in Flax NNX that call `jaxspeed.ops`, one file per family.

A family's module has `Config` (a frozen dataclass of sizes), `PRESETS` (configs by name),
`build(config, rngs)` and `loss(model, batch) -> (sum, weight)`. Families are imported on demand.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from flax import nnx

FAMILIES: dict[str, str] = {
    "gpt2": "jaxspeed.models.gpt2",
    "llama": "jaxspeed.models.llama",
    "vit": "jaxspeed.models.vit",
    "mlp": "jaxspeed.models.mlp",
}


class Built(NamedTuple):
    """Factory, loss and config of a model."""

    factory: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[..., Any]
    config: Any


def family(name: str) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(_lookup("model family", name, FAMILIES))


def build(
    name: str, preset: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Built:
    """A family's factory, loss and config: a preset, or the family's defaults, with `overrides`.

    Raises:
      ValueError: unknown family, preset or field, with the closest known name.
    """
    module = family(name)
    config = module.Config() if preset is None else _lookup("preset", preset, module.PRESETS)
    fields = {field.name: field.name for field in dataclasses.fields(config)}
    for key in overrides or {}:
        _lookup(f"field of the {name} config", key, fields)
    config = dataclasses.replace(config, **(overrides or {}))
    return Built(lambda rngs: module.build(config, rngs), module.loss, config)


def _lookup(what: str, name: str, table: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    raise ValueError(f"unknown {what} {name!r}: {_suggest(name, table)}")


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}known are {', '.join(known)}"
