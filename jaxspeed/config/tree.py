"""Paths into nested configs, and the schema seen as a tree of keys."""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from jaxspeed.config.lr_schedules import SCHEDULERS
from jaxspeed.config.optimizers import OPTIMIZERS
from jaxspeed.config.schema import Settings
from jaxspeed.config.types import Section

PARAMS = {"optimizer.params": OPTIMIZERS, "scheduler.params": SCHEDULERS}


def read(node: Any, path: str, default: Any = None) -> Any:
    """Read the value at a path of mappings, sections and lists; `default` if there is none."""
    for part in path.split("."):
        if isinstance(node, dict):
            node = node.get(part, default)
        elif isinstance(node, list | tuple) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, BaseModel):
            node = getattr(node, part, default)
        else:
            return default
    return node


def given_leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of a user's tree; mappings and lists of mappings are flattened."""
    if isinstance(node, dict) and node:
        items: Any = node.items()
    elif isinstance(node, list) and node and all(isinstance(item, dict) for item in node):
        items = enumerate(node)
    else:
        yield prefix, node
        return
    for key, value in items:
        yield from given_leaves(value, f"{prefix}.{key}" if prefix else str(key))


def without(node: Any, path: tuple[Any, ...]) -> None:
    """Remove the value at a path, in place."""
    *parents, last = path
    for part in parents:
        node = node[part]
    del node[last]


def section_in(annotation: Any) -> type[Section] | None:
    """Section type of a field: itself, optional, or as items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, typing.get_args(annotation))), None)


def schema_leaves(section: type[Section] = Settings, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key that is not itself a section, each once."""
    seen = set()
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = section_in(field.annotation)
        if inner is not None:
            yield from schema_leaves(inner, f"{path}.")
        elif path in PARAMS:
            for params in PARAMS[path].values():
                for leaf in schema_leaves(params, f"{path}."):
                    if leaf not in seen:
                        seen.add(leaf)
                        yield leaf
        else:
            yield path


def keys_in(path: str) -> list[str]:
    """Keys of the section at `path` in the schema; those of the top level for ""."""
    section: type[Section] | None = Settings
    for part in path.split(".") if path else ():
        if part.isdigit():
            continue
        field = section.model_fields.get(part) if section else None
        section = section_in(field.annotation) if field else None
    return list(section.model_fields) if section else []
