"""Module scopes: named scopes that tag each equation of a trace with its module calls.

The model does not change, and consumers of the scopes do not depend on Flax. A scope's name has the
call's serial number (unique in this process), class and path.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any

import jax

_PATTERN = re.compile(r"unit:(\d+):(\w*):([^:()/]*):")
_serial = itertools.count()
_lock = RLock()


@dataclass(frozen=True)
class Call:
    """One call of a module or of a function marked as a unit, parsed from a scope's name."""

    serial: int
    kind: str  # the class or function
    path: str  # in the model; empty if unknown (the body of a scan)


@functools.lru_cache(maxsize=65536)
def calls_in(name_stack: str) -> tuple[Call, ...]:
    """The calls that an equation was traced under, outermost first, each once."""
    calls = {
        int(serial): Call(int(serial), kind, path.replace(".", "/"))
        for serial, kind, path in _PATTERN.findall(name_stack)
    }
    return tuple(calls.values())


def scope(kind: str, path: str = "") -> Any:
    """Context manager that tags the equations traced in it with a new call."""
    kind = re.sub(r"\W", "", kind)  # of a lambda: <lambda>
    path = re.sub(r"[:()]", "_", path.replace("/", "."))
    return jax.named_scope(f"unit:{next(_serial)}:{kind}:{path}:")


def unit[Function: Callable[..., Any]](fn: Function) -> Function:
    """Mark a function as a unit: ZeRO 3 gathers the weights of one call at a time.

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
    """Context manager that tags the equations of each `__call__` of these classes."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with scope(type(self).__name__, path_of(self)):
                return original(self, *args, **kwargs)

        return call

    with _lock:
        originals: dict[Any, Any] = {}
        try:
            for cls in dict.fromkeys(classes):
                if callable(getattr(cls, "__call__", None)):  # noqa: B004
                    originals[cls] = vars(cls).get("__call__")
                    setattr(cls, "__call__", wrap(cls.__call__))  # noqa: B010
            yield
        finally:
            for cls, original in originals.items():
                if original is None:
                    del cls.__call__
                else:
                    setattr(cls, "__call__", original)  # noqa: B010
