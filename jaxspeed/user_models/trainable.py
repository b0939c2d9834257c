"""The `trainable` argument: path patterns, functions of the path, and filters of nnx."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx
from flax.nnx import filterlib

from jaxspeed.config import match
from jaxspeed.errors import ModelError
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rules import nearest

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class Selection:
    """`__call__(paths, leaf as the model has it)`: whether it is trained.

    A Variable that a model has at several paths is trained if a pattern or a function chooses one
    of them. A filter of nnx gets the first, under which Flax lists it.
    """

    chosen: Callable[[Sequence[str], Any], bool]
    patterns: tuple[str, ...] = ()  # each has to cover a parameter
    types: tuple[type, ...] = ()  # of Variables that the filter names
    by_leaf: bool = False  # whether it depends on more than the path

    def __call__(self, paths: Sequence[str], leaf: Any) -> bool:
        return self.chosen(paths, leaf)

    def adds(self, path: str, leaf: Any) -> bool:
        """Whether a Variable that is no Param is trained: the filter names its type."""
        return isinstance(leaf, self.types) and self.chosen((path,), leaf)

    def check(self, paths: Sequence[str]) -> None:
        """Name the patterns that cover no parameter; ModelError if none of them does."""
        idle = [p for p in self.patterns if not any(match(p, path) for path in paths)]
        notes = [
            f"trainable: {pattern!r} covers no parameter of this model; nearest: "
            + listed(nearest(pattern, paths))
            for pattern in idle
        ]
        if notes and len(idle) == len(self.patterns) and not self.by_leaf:
            raise ModelError("; ".join(notes))
        for note in notes:
            log.warning("%s", note)


def read_trainable(wanted: Any) -> Selection:
    """Parse `trainable`; None and `...` are all parameters."""
    if wanted is None or wanted is ... or wanted is True:
        return Selection(lambda paths, leaf: True)
    if isinstance(wanted, str):
        return Selection(lambda paths, leaf: any(match(wanted, p) for p in paths), (wanted,))
    if isinstance(wanted, type):
        return _of_filter(filterlib.OfType(wanted))
    if callable(wanted):
        if _required(wanted) == 2:
            return _of_filter(wanted)
        return Selection(lambda paths, leaf: any(wanted(path) for path in paths))
    if isinstance(wanted, Sequence) and all(_is_one(part) for part in wanted):
        parts = [read_trainable(part) for part in wanted]
        return Selection(
            lambda paths, leaf: any(part(paths, leaf) for part in parts),
            tuple(pattern for part in parts for pattern in part.patterns),
            tuple(kind for part in parts for kind in part.types),
            any(part.by_leaf for part in parts),
        )
    raise ModelError(
        f"trainable is {wanted!r}; it may be path patterns, a function of the path, or a Variable "
        "type or another filter of nnx"
    )


def _is_one(part: Any) -> bool:
    return isinstance(part, str) or callable(part)


def _of_filter(predicate: Callable[[Any, Any], bool]) -> Selection:
    """The selection by a filter of nnx, which gets the path as a tuple."""

    def chosen(paths: Sequence[str], leaf: Any) -> bool:
        keys = tuple(int(part) if part.isdigit() else part for part in paths[0].split("/"))
        return bool(predicate(keys, leaf))

    return Selection(chosen, types=tuple(_named_types(predicate)), by_leaf=True)


def _named_types(predicate: Any) -> list[type]:
    """Variable types that a filter names, other than Param and its bases."""
    if isinstance(predicate, filterlib.OfType):
        wide = not issubclass(predicate.type, nnx.Variable) or issubclass(nnx.Param, predicate.type)
        return [] if wide else [predicate.type]
    if isinstance(predicate, filterlib.Any | filterlib.All):
        return [kind for part in predicate.predicates for kind in _named_types(part)]
    return []


def _required(function: Callable[..., Any]) -> int:
    """The number of positional parameters without a default."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in found)
