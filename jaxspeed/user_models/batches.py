"""What a loss is called with beside its model: the batch, random keys, and extra arrays.

A batch is divided into micro-batches along the first dim of its arrays. Scalars are for every
micro-batch, and so are random keys (arrays of a key dtype), of which each micro-batch gets its own.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import BatchError, ModelError
from jaxspeed.user_models.batch_checks import array_of, check_arrays, is_tensor
from jaxspeed.user_models.protocol import MODE_ARGUMENTS, SEED
from jaxspeed.user_models.rng import batch_key, is_key, loss_key

EXTRA = "(extra)"  # among a step's variables: the extra arrays
RNG_ARGUMENTS = ("rng", "key", "rng_key", "prng_key", "random_key")  # of a loss or an `apply`
EXTRA_ARGUMENT = "extra"
CALLS = "loss_fn(model, batch), with rng, extra and train where it has parameters of these names"
Number = bool | int | float | complex


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithExtra:
    """A batch, and arrays that the loss gets as they are, not divided into samples."""

    samples: Any
    extra: Any


# -- before the step -------------------------------------------------------------------------------


def read_batch(
    batch: Any, extra: Any = None, *, name: str = "batch", abstract: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Check a batch, and return (the batch as a step takes it, its arrays by path).

    Tensors of other libraries and Python numbers become arrays. `abstract` lets shapes stand for
    arrays.
    """
    if isinstance(batch, WithExtra):
        batch, extra = batch.samples, batch.extra
    batch = _with_arrays(batch, name)
    arrays = check_arrays(batch, name=name, abstract=abstract)
    if extra is None:
        return batch, arrays
    extra = _with_arrays(extra, EXTRA_ARGUMENT)
    check_arrays(extra, name=EXTRA_ARGUMENT, abstract=abstract)
    return WithExtra(batch, extra), arrays


def _with_arrays(tree: Any, name: str) -> Any:
    """Replace tensors and Python numbers by arrays.

    Except a list of nothing but numbers, which is samples or a mistake.
    """
    try:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    except (ValueError, TypeError):  # `check_arrays` reports it
        return tree
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(int))
    for keys, x in leaves:
        if isinstance(x, int) and not limits.min <= x <= limits.max:
            place = name + jax.tree_util.keystr(keys)
            raise BatchError(f"{place} is {x}, which does not fit {limits.dtype}; pass a float")
    mixed = {keys[:-1] for keys, x in leaves if not isinstance(x, Number)}

    def array(keys: tuple[Any, ...], x: Any) -> Any:
        if is_tensor(x):
            return array_of(x, name + jax.tree_util.keystr(keys))
        return jnp.asarray(x) if _stands_alone(keys, x, mixed) else x

    return jax.tree.unflatten(structure, [array(keys, x) for keys, x in leaves])


def _stands_alone(keys: tuple[Any, ...], x: Any, mixed: set[Any]) -> bool:
    """Whether a leaf is a Python number that is no item of a list of numbers."""
    if not isinstance(x, Number) or isinstance(x, np.generic) or not keys:
        return False
    return not isinstance(keys[-1], jax.tree_util.SequenceKey) or keys[:-1] in mixed


def example_shapes(batch: Any) -> Any:
    """Shapes of an example batch, whose arrays may themselves be shapes."""
    read, _ = read_batch(batch, name="example_batch", abstract=True)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), read)


def zeros_of(shapes: Any) -> Any:
    """Arrays of these shapes; keys where the dtype is that of keys."""

    def zero(x: Any) -> jax.Array:
        if is_key(x):
            return jnp.broadcast_to(jax.random.key(0), x.shape)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(zero, shapes)


# -- in the step -----------------------------------------------------------------------------------


def with_extra(variables: Mapping[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    """(variables with the extra arrays, the batch without them)."""
    if isinstance(batch, WithExtra):
        return {**variables, EXTRA: batch.extra}, batch.samples
    return dict(variables), batch


def takes_rng(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss has a parameter for a random key."""
    return any(name in RNG_ARGUMENTS for name in _own_arguments(loss_fn))


def call_loss(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    variables: Mapping[str, Any],
    step: Any,
    micro: Any,
    *,
    train: bool,
) -> Any:
    """Call the user's loss for micro-batch `micro`, with what its parameters ask for."""
    batch = jax.tree.map(lambda x: batch_key(x, micro) if is_key(x) and not x.shape else x, batch)
    keywords: dict[str, Any] = {}
    for name in _own_arguments(loss_fn):
        if name in MODE_ARGUMENTS:
            keywords[name] = MODE_ARGUMENTS[name] == train
        elif name in RNG_ARGUMENTS:
            keywords[name] = loss_key(variables[SEED], step, micro)
        elif EXTRA in variables:
            keywords[name] = variables[EXTRA]
        elif inspect.signature(loss_fn).parameters[name].default is not None:
            raise BatchError(
                "loss_fn has a parameter extra, and no extra arrays were passed: "
                "train_batch(batch, extra=...), or initialize(..., example_extra=...) where the "
                "loss is traced for an example batch"
            )
    if EXTRA in variables and EXTRA_ARGUMENT not in keywords:
        raise ModelError("loss_fn has no parameter extra to take the extra arrays of the batch")
    return loss_fn(model, batch, **keywords)


def _own_arguments(loss_fn: Callable[..., Any]) -> list[str]:
    """Parameters of a loss after (model, batch), which are passed by name."""
    try:
        _, _, *rest = inspect.signature(loss_fn).parameters.values()
    except (ValueError, TypeError):  # fewer parameters: the call fails with Python's own words
        return []
    names = (*RNG_ARGUMENTS, EXTRA_ARGUMENT, *MODE_ARGUMENTS)
    for p in rest:
        if (
            p.name not in names
            and p.default is p.empty
            and p.kind
            not in (
                p.VAR_POSITIONAL,
                p.VAR_KEYWORD,
            )
        ):
            raise ModelError(f"loss_fn has a parameter {p.name}; it is called as {CALLS}")
    # Another default is the user's own value.
    return [p.name for p in rest if p.name in names and p.default in (p.empty, None)]
