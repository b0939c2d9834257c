"""Validation of a batch: arrays of numbers whose first dim divides over the data ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.config import Batch
from jaxspeed.errors import BatchError

Arrays = np.ndarray | np.generic | jax.Array
RAW_KEYS = ((2,), (4,))  # shapes of the uint32 form of a key: of threefry, of rbg


def check_arrays(batch: Any, *, name: str = "batch", abstract: bool = False) -> dict[str, Any]:
    """Collect the arrays of a batch by path; raise BatchError for anything else.

    `abstract` lets shapes stand for arrays (`jax.ShapeDtypeStruct`).
    """
    try:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
    except (ValueError, TypeError) as error:  # keys that cannot be sorted, say
        raise BatchError(f"the {name} is no tree of arrays: {error}") from None
    if not leaves:
        raise BatchError(f"the {name} holds no arrays")
    arrays = {name + jax.tree_util.keystr(keys): x for keys, x in leaves}
    allowed = Arrays | jax.ShapeDtypeStruct if abstract else Arrays
    for place, x in arrays.items():
        if not isinstance(x, allowed):
            raise BatchError(f"{place} is a {_kind(x)}; it must be a NumPy or JAX array")
        if not is_numeric(x.dtype):
            raise BatchError(f"{place} has dtype {x.dtype}; it must be an array of numbers")
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise BatchError(
                f"{place} has been deleted: it was donated to a function (donate_argnums)"
            )
    return arrays


def is_tensor(x: Any) -> bool:
    """Whether a leaf is an array of another library: torch's, for example."""
    if isinstance(x, Arrays | jax.ShapeDtypeStruct | type):
        return False
    return hasattr(x, "__array__") or hasattr(x, "__dlpack__")


def array_of(tensor: Any, place: str) -> np.ndarray | jax.Array:
    """The array of another library's, through `__array__` or else DLPack.

    torch has DLPack alone for bfloat16, which NumPy does not read, and for tensors on a GPU.

    Raises:
      BatchError: neither is possible: it requires gradients, or is where JAX has no device.
    """
    reads = (np.asarray,) if hasattr(tensor, "__array__") else ()
    if hasattr(tensor, "__dlpack__"):
        reads = (*reads, np.from_dlpack, jnp.from_dlpack)
    refused: list[Exception] = []
    for read in reads:
        try:
            return read(tensor)
        except Exception as error:  # each library has its own
            refused.append(error)
    raise BatchError(f"{place} is a {_kind(tensor)} that cannot be read: {refused[0]}")


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def check_train_batch(arrays: dict[str, Any], batch: Batch, ranks: int) -> None:
    """Raise BatchError unless each array that is no scalar has `train_batch_size` samples."""
    for place, x in arrays.items():
        if x.shape and x.shape[0] != batch.train:
            raise BatchError(
                f"{place} has {x.shape[0]} samples, but train_batch_size is {batch.train} = "
                f"{batch.micro} per rank x {batch.accumulation} micro-batches x {ranks} data ranks"
                f"{_advice({place: x})}"
            )


def check_shared_evenly(arrays: dict[str, Any], ranks: int) -> None:
    """Raise BatchError unless all arrays have the same number of samples, divisible by ranks."""
    sizes = {place: x.shape[0] for place, x in arrays.items() if x.shape}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{place} {n}" for place, n in sizes.items())
        raise BatchError(
            f"the arrays of a batch differ in their number of samples: {shown}{_advice(arrays)}"
        )
    n = next(iter(sizes.values()), ranks)
    if n % ranks or n == 0:
        near = dict.fromkeys(max(k, 1) * ranks for k in (n // ranks, -(-n // ranks)))
        raise BatchError(
            f"the batch has {n} samples, which {ranks} data ranks cannot share evenly; "
            f"{' or '.join(map(str, near))} would do"
        )


def _advice(arrays: dict[str, Any]) -> str:
    """What to do about an array that may be meant as a random key."""
    raw = [place for place, x in arrays.items() if x.dtype == np.uint32 and x.shape in RAW_KEYS]
    return "".join(
        f"; if {place} is a random key, pass it typed: jax.random.wrap_key_data({place})"
        for place in raw[:1]
    )


def shapes_text(batch: Any) -> str:
    """Format a batch on one line: `['x'] float32[8, 4], ['y'] None`."""

    def is_none(x: Any) -> bool:
        return x is None

    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_none)
    return ", ".join(f"{jax.tree_util.keystr(keys)} {_shape_text(x)}".strip() for keys, x in leaves)


def _shape_text(x: Any) -> str:
    if not hasattr(x, "shape"):
        return str(x)
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def is_numeric(dtype: Any) -> bool:
    """Whether JAX can hold numbers (or random keys) of this dtype."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # typed random keys
        return True
    return dtype.kind not in "mM" and (
        jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    )
