"""Errors in the user's model or loss, reported with the call and its arguments.

Such an error is raised deep inside a trace, often in JAX's or Flax's frames. It becomes the cause
of a ModelError that states which function was called, with what, and the line that it reached.
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
    """Context for user code; `call` is how it is called, such as `loss_fn(model, batch)`."""
    try:
        yield
    except (JaxspeedError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        given = "" if batch is None else f"; its micro-batch: {shapes_text(batch)}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "(no message)"
        raise ModelError(
            f"{call} raised {type(error).__name__}{_where(error)}: {reason}{given}"
        ) from error


def _where(error: Exception) -> str:
    """Last line of the user's code that was reached."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
