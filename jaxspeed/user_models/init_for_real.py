"""Models whose initialization needs values of arrays, and so cannot be traced.

`int(jnp.prod(...))` in a factory, or NumPy in an initializer. Such a model is built for real in
host memory, first for its shapes and then for its values, which are sharded one array at a time.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxspeed.errors import ModelError
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.show import bytes_text
from jaxspeed.user_models.user_code import reason_of

NEEDS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def shapes_of(build: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """(shapes of `build(*args)`, why it was built for real, or None)."""
    try:
        return jax.eval_shape(build, *args), None
    except ModelError as error:
        if not isinstance(error.__cause__, NEEDS):
            raise
        reason = reason_of(error.__cause__).splitlines()[0]
        with in_host_memory():
            values = build(*args)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
        return shapes, f"{type(error.__cause__).__name__}: {reason}"


def init_values(reason: str | None, init: Callable[[Any], Any], seed: Any) -> Any:
    """`init(seed)`; if it was found to need values, in host memory."""
    if reason is None:
        return init(seed)
    if isinstance(seed, jax.core.Tracer):
        raise ModelError(f"this model cannot be initialized in a traced program: {reason}")
    with in_host_memory():
        return init(seed)


def in_host_memory() -> contextlib.AbstractContextManager[Any]:
    """Context in which arrays are created in host memory, where JAX has a CPU backend."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def note_of(reason: str | None, leaves: Sequence[Leaf]) -> list[str]:
    """Note on a model that is built for real."""
    if reason is None:
        return []
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return [
        f"the initialization needs values of arrays ({reason}), so it cannot be traced: the model "
        f"is built in host memory, which takes {bytes_text(size)}, and sharded one parameter at "
        "a time"
    ]
