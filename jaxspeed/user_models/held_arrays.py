"""Arrays in plain Python objects of an nnx module: tables of positions, random features, schedules.

Flax takes such an object for a constant. While a factory is traced its arrays are tracers, which
the constant would carry into other programs. So the object is stored as a tree of its arrays, part
of the module's state, and is copied with this state's values when a module is built.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
from flax import nnx


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class HeldArrays:
    """An object, and values of its arrays by the path inside it."""

    template: Any
    arrays: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(value: Any) -> "HeldArrays | None":
        """The object with the arrays that it holds at any depth; None if it holds none."""
        arrays = _arrays(value)
        return HeldArrays(value, arrays) if arrays else None

    def copied(self) -> Any:
        """A copy of the object with these values."""
        old = _arrays(self.template)
        return copy.deepcopy(self.template, {id(x): self.arrays[path] for path, x in old.items()})

    def changed(self, copied: Any) -> str | None:
        """Path of an array in a copy that is another than this one's; None if all are the same."""
        now = _arrays(copied)
        return next((path for path, x in now.items() if x is not self.arrays.get(path)), None)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keys = [(jax.tree_util.GetAttrKey(path), x) for path, x in self.arrays.items()]
        return keys, (_Identity(self.template), tuple(self.arrays))

    @classmethod
    def tree_unflatten(cls, aux: Any, values: Any) -> "HeldArrays":
        template, paths = aux
        return cls(template.value, dict(zip(paths, values, strict=True)))


@dataclass(frozen=True, eq=False)
class _Identity:
    """A value that equals itself alone, and can be hashed."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_OTHERS = (nnx.Pytree, nnx.Variable, type, ModuleType, FunctionType, str, bytes)


def _arrays(value: Any) -> dict[str, jax.Array]:
    """Arrays by path of what `copy.deepcopy` copies, except for modules and Variables."""
    arrays: dict[str, jax.Array] = {}
    seen: set[int] = set()
    waiting = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _OTHERS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, jax.Array):
            arrays[path] = value
            continue
        if isinstance(value, Mapping):
            inside: Any = value.items()
        elif isinstance(value, (list, tuple)):
            inside = enumerate(value)
        elif isinstance(value, MethodType):
            inside = [("self", value.__self__)]
        elif isinstance(value, functools.partial):
            inside = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        else:
            inside = getattr(value, "__dict__", {}).items()
        waiting += [(f"{path}.{name}" if path else str(name), member) for name, member in inside][
            ::-1
        ]
    return arrays
