"""Output of others while a line moves: it must go above that line, not through it."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Whether a person sees it; what is redirected to a file should go on to the file."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


@contextmanager
def written_above() -> Iterator[None]:
    """Handlers of `logging` that hold the real streams write to those that stand in for them.

    Rich replaces `sys.stdout` and `sys.stderr` while something moves, but a handler that was made
    before has the stream itself.
    """
    stand_ins = {
        id(stream.rich_proxied_file): stream
        for stream in (sys.stdout, sys.stderr)
        if hasattr(stream, "rich_proxied_file")
    }
    moved = []
    for handler in _handlers():
        stream = getattr(handler, "stream", None)
        if isinstance(handler, logging.StreamHandler) and id(stream) in stand_ins:
            handler.setStream(stand_ins[id(stream)])
            moved.append((handler, stream))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _handlers() -> list[logging.Handler]:
    """Of every logger, each once."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return list({id(handler): handler for handler in found}.values())
