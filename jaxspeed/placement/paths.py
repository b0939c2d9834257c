"""Paths of the leaves of a tree, spelled `blocks/3/attn/kernel`."""

from collections.abc import Sequence
from typing import Any

import jax


def path_of(keys: tuple[Any, ...]) -> str:
    """Convert a key path of `jax.tree_util` to a path."""
    return "/".join(_name(key) for key in keys)


def _name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def flat_with_paths(tree: Any) -> dict[str, Any]:
    """Flatten a tree to `{path: leaf}`, in the order of its leaves."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def counted(number: int, noun: str, plural: str = "s") -> str:
    """'1 device', '8 devices'; 'batch' has the plural 'es'."""
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join the first names, and state how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
