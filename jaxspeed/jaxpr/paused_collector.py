"""Python's garbage collector paused while programs are traced, lowered and analyzed."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector of cyclic garbage.

    A trace makes millions of objects that live on, and each full collection visits all of them: a
    third of the time of tracing 24 layers, to free a few dozen objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
