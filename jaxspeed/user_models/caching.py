"""Key-value caches of models: created, and found among their variables.

A model keeps one if, as in Flax, its modules have `init_cache` (NNX, `nnx.Cache` variables) or
it has a mode `decode` in which calls fill the collection `cache` (Linen).
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed.objectives.model_logprobs import call_parameters

# Dims of a cache's keys and values, the last ones of their arrays, by the names that Flax and our
# families give these arrays. Other arrays of a cache are replicated.
OF_FLAX = ("batch", "pos", "kv_heads", "head_dim")
OF_FAMILIES = ("batch", "kv_heads", "pos", "head_dim")
CACHE_DIMS = {
    "cached_key": OF_FLAX,
    "cached_value": OF_FLAX,
    "key_cache": OF_FAMILIES,
    "value_cache": OF_FAMILIES,
}


def cache_names(path: str, dims: int) -> tuple[str | None, ...]:
    """Logical names of the dims of an array of a cache."""
    names = CACHE_DIMS.get(path.rpartition("/")[2], ())
    return (*[None] * (dims - len(names)), *names) if dims >= len(names) else (None,) * dims


def create_caches(module: nnx.Module, rows: int, length: int, dtype: Any) -> bool | None:
    """Create the caches of an nnx module; None if it keeps none, else whether it is one by one.

    Modules of Flax have init_cache(input_shape, dtype), others init_cache(rows, length, dtype): one
    for the entire model, or one in each module with a cache.
    """
    parts: list[Any] = [m for _, m in nnx.iter_modules(module) if hasattr(m, "init_cache")]
    parts = [module] if module in parts else parts
    if not parts:
        return None
    one_by_one = "positions" not in call_parameters(module)
    for part in parts:
        if "input_shape" in inspect.signature(part.init_cache).parameters:
            one_by_one = True
            part.init_cache((rows, length, part.in_features), dtype)
            _stack(part)
        else:
            part.init_cache(rows, length, dtype)
    for _, part in nnx.iter_modules(module):
        if hasattr(part, "decode"):
            part.decode = True
    return one_by_one


def _stack(part: Any) -> None:
    """Give the caches of a module of Flax the first dims of its stacked parameters."""
    stack = part.query.kernel.shape[:-3]
    for cache in (part.cached_key, part.cached_value, part.cache_index):
        value = cache.get_value()
        cache.set_value(jnp.broadcast_to(value, (*stack, *value.shape)))


def in_decoding(module: Any) -> Any | None:
    """A Linen module in its mode `decode`, a field of it or of its config; None without one."""
    if hasattr(module, "decode"):
        return module.clone(decode=True)
    config = getattr(module, "config", None)
    if dataclasses.is_dataclass(config) and hasattr(config, "decode"):
        return module.clone(config=dataclasses.replace(config, decode=True))  # type: ignore[type-var]
    return module if decode_argument(module) else None


def decode_argument(module: Any) -> dict[str, bool]:
    """The mode `decode` of a call, where it is an argument."""
    return {"decode": True} if "decode" in call_parameters(module) else {}


def shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
