"""Paths into nested configs, and the schema as a vocabulary of keys."""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from jaxspeed.config.lr_schedules import SCHEDULERS
from jaxspeed.config.optimizers import OPTIMIZERS
from jaxspeed.config.schema import Settings
from jaxspeed.config.types import Section
from jaxspeed.config.verdicts import Key

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


def schema_keys(section: type[Section] = Settings, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield path and declaration of every key that is not itself a section.

    Parameters that several optimizers or schedules have are yielded once for each.
    """
    for name, field in section.model_fields.items():
        path = prefix + name
        if isinstance(field.json_schema_extra, Key):
            yield path, field.json_schema_extra
            continue
        inner = section_in(field.annotation)
        for params in [inner] if inner else dict.fromkeys(PARAMS[path].values()):
            yield from schema_keys(params, f"{path}.")


VOCABULARY: dict[str, Key] = dict(schema_keys())
"""All config keys by path."""


def declared(path: str) -> tuple[str, Key] | None:
    """Find a key, or the nearest free-form section around it: (its path, its declaration).

    List items are declared by their list: `optimizer.groups.0.frozen` by `optimizer.groups.frozen`.
    """
    parts = [part for part in path.split(".") if not part.isdigit()]
    while parts:
        key_path = ".".join(parts)
        if key := VOCABULARY.get(key_path):
            return key_path, key
        parts.pop()
    return None


def section_at(path: str, root: type[Section] = Settings) -> type[Section] | None:
    """Section of the schema, or of one in it, at a path; itself for ""."""
    section: type[Section] | None = root
    for part in path.split(".") if path else ():
        if part.isdigit():
            continue
        field = section.model_fields.get(part) if section else None
        section = section_in(field.annotation) if field else None
    return section


def section_paths(section: type[Section] = Settings, prefix: str = "") -> Iterator[str]:
    """Yield the path of every section below."""
    for name, field in section.model_fields.items():
        if inner := section_in(field.annotation):
            yield prefix + name
            yield from section_paths(inner, f"{prefix}{name}.")


def keys_in(path: str) -> list[str]:
    """Keys of the section at `path` in the schema; those of the top level for ""."""
    section = section_at(path)
    return list(section.model_fields) if section else []
