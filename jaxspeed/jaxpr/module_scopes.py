"""Module scopes: named scopes that tag each equation of a trace with its module calls.

Nothing of the model changes, and nothing of Flax needs to be known by what reads the names later.
A name says which call (a serial number, unique in this process), of which class, at which path.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any, TypeVar

import jax

_PATTERN = re.compile(r"unit:(\d+):(\w*):([^:()/]*):")
_serial = itertools.count()
_lock = RLock()
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """One call of a module or marked function, as an equation's name tells it."""

    serial: int
    kind: str  # the class or function
    path: str  # where in the model; empty when it is not known (the body of a scan)


@functools.lru_cache(maxsize=65536)
def calls_in(name_stack: str) -> tuple[Call, ...]:
    """The calls that an equation was traced under, outermost first, each once."""
    found = {
        int(serial): Call(int(serial), kind, path.replace(".", "/"))
        for serial, kind, path in _PATTERN.findall(name_stack)
    }
    return tuple(found.values())


def scope(kind: str, path: str = "") -> Any:
    """Inside this context every equation carries the name of one call."""
    kind = re.sub(r"\W", "", kind)  # of a lambda: <lambda>
    path = re.sub(r"[:()]", "_", path.replace("/", "."))
    return jax.named_scope(f"unit:{next(_serial)}:{kind}:{path}:")


def unit(fn: Function) -> Function:
    """Mark a function as a unit: ZeRO 3 gathers the weights that one call of it reads at a time.

    For models that are plain functions; modules need no mark.

        @jaxspeed.unit
        def block(params, x): ...
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with scope(getattr(fn, "__name__", "unit")):
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


@contextlib.contextmanager
def tagged(classes: Iterable[Any], path_of: Callable[[Any], str]) -> Iterator[None]:
    """Inside, each `__call__` of an instance of these classes leaves its name."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with scope(type(self).__name__, path_of(self)):
                return original(self, *args, **kwargs)

        return call

    with _lock:
        own: dict[Any, Any] = {}
        try:
            for cls in dict.fromkeys(classes):
                if callable(getattr(cls, "__call__", None)):  # noqa: B004
                    own[cls] = vars(cls).get("__call__")
                    setattr(cls, "__call__", wrap(cls.__call__))  # noqa: B010
            yield
        finally:
            for cls, original in own.items():
                if original is None:
                    del cls.__call__
                else:
                    setattr(cls, "__call__", original)  # noqa: B010
