"""Device memory and pinned host memory: tests and transfers of arrays in a traced program.

A traced array has its memory space in its type, and no operation mixes two: an array in host memory
is transferred before it is used.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspeed.placement.rows import HOST


def in_host(at: Any) -> bool:
    """Whether a Placement or a sharding is in host memory."""
    return bool(at.memory_kind == HOST)


def to_device(x: jax.Array, at: NamedSharding) -> jax.Array:
    """Transfer `x` to device memory, with this sharding; traced."""
    return jax.device_put(x, at.with_memory_kind("device"))


def to_host(x: jax.Array, at: NamedSharding) -> jax.Array:
    """Transfer `x` to host memory, with this sharding; traced."""
    return jax.device_put(x, at.with_memory_kind(HOST))


def on_host(x: jax.Array) -> bool:
    """Whether a traced array is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def in_memory_of(x: jax.Array, like: jax.Array) -> jax.Array:
    """Transfer `x` to host memory if `like` is there; traced."""
    return jax.device_put(x, jax.memory.Space.Host) if on_host(like) and not on_host(x) else x


def on_device(tree: Any) -> Any:
    """Transfer the arrays of a tree that are in host memory to device memory; traced."""

    def moved(x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x

    return jax.tree.map(moved, tree)
