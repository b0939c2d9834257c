"""Errors in the user's model or loss, reported with the call and its arguments.

Such an error is raised deep inside a trace, often in JAX's or Flax's frames. It becomes the cause
of a ModelError that states which function was called, with what, and the line that it reached.
"""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspeed.errors import LIBRARIES, JaxspeedError, ModelError
from jaxspeed.user_models.batch_checks import shapes_text


@contextlib.contextmanager
def foreign(call: str, batch: Any = None) -> Iterator[None]:
    """Context for user code; `call` is how it is called, such as `loss_fn(model, batch)`."""
    try:
        yield
    except (JaxspeedError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        shapes = "" if batch is None else f"; its micro-batch: {shapes_text(batch)}"
        raise ModelError(
            f"{call} raised {type(error).__name__}{_where(error)}: {reason_of(error)}{shapes}"
            f"{_advice(error)}"
        ) from error


# Boilerplate lines of the messages of JAX and Flax.
NOISE = re.compile(
    r"^(-{4,}|See https?://|For simplicity, JAX has removed|Found at:? *$"
    r"|The error occurred while tracing the function)"
)
LINES, CHARACTERS = 12, 1200


def reason_of(error: Exception) -> str:
    """An exception's message without its boilerplate: all lines that matter, up to a limit."""
    lines = [line.rstrip() for line in str(error).strip().splitlines()]
    kept = [line for line in lines if line and not NOISE.match(line.strip())]
    text = "\n".join(kept[:LINES])
    is_long = len(kept) > LINES or len(text) > CHARACTERS
    return (text[:CHARACTERS] + (" ..." if is_long else "")) or "(no message)"


# (what a message has, what helps)
ADVICE = (
    (
        re.compile(r"should match the mesh passed to shard_map|[Ss]et_mesh.* can only be used"),
        "the model brings a mesh of its own: remove its jax.shard_map, jax.set_mesh and mesh= "
        "arguments. The config's mesh shards parameters and activations",
    ),
    (
        re.compile(r"__array__\(\) was called on traced array"),
        "NumPy computes with values, which are not known while a step is compiled: call jax.numpy "
        "(jnp) in its place",
    ),
    (
        re.compile(r"boolean conversion of traced array"),
        "Python cannot branch on a value that is not known while a step is compiled: call "
        "jnp.where or jax.lax.cond",
    ),
    (
        re.compile(r"Resource axis: \w+ of .* is not found in mesh"),
        "the model constrains a sharding over a mesh of its own: call it as "
        "jax.lax.with_sharding_constraint, which is then ignored, or remove it",
    ),
)


def _advice(error: Exception) -> str:
    return "".join(f"; {help}" for pattern, help in ADVICE if pattern.search(str(error)))


def _where(error: Exception) -> str:
    """Last line of the user's code that was reached."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return (
        f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})"
        if user_frames
        else ""
    )
