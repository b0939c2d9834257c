"""Errors from the user's own code, told with what it was given.

A model's or a loss's error surfaces deep inside a trace, often in JAX's or Flax's own frames. It is
handed on as the cause of a ModelError that says whose code was called, with what, and which line of
it was reached.
"""

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspeed.errors import JaxspeedError, ModelError
from jaxspeed.objective.batch_checks import shapes_text

# Frames in here are not the user's.
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")),
    str(Path(__file__).parents[1]),
    "<",
)


@contextlib.contextmanager
def foreign(call: str, batch: Any = None) -> Iterator[None]:
    """Inside runs the user's code; `call` is how it is called, `loss_fn(model, batch)`."""
    try:
        yield
    except (JaxspeedError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        given = "" if batch is None else f"; the micro-batch it was given: {shapes_text(batch)}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "(no message)"
        raise ModelError(
            f"{call} raised {type(error).__name__}{_where(error)}: {reason}{given}"
        ) from error


def _where(error: Exception) -> str:
    """The last line of the user's code that was reached."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
