"""The two memories of a device: its own, and the pinned memory of its host.

Inside a traced program an array carries its memory in its type, and operations mix none: what waits
in host memory is moved before it is used.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspeed.placement.rows import HOST


def in_host(at: Any) -> bool:
    """Whether a Placement or a sharding lies in host memory."""
    return bool(at.memory_kind == HOST)


def to_device(x: jax.Array, at: NamedSharding) -> jax.Array:
    """`x` as it is cut, in the device's own memory; traced."""
    return jax.device_put(x, at.with_memory_kind("device"))


def to_host(x: jax.Array, at: NamedSharding) -> jax.Array:
    """`x` as it is cut, in host memory; traced."""
    return jax.device_put(x, at.with_memory_kind(HOST))


def on_host(x: jax.Array) -> bool:
    """Whether a traced array is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def in_memory_of(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` in the memory that `like` is in; traced."""
    return jax.device_put(x, jax.memory.Space.Host) if on_host(like) and not on_host(x) else x


def on_device(tree: Any) -> Any:
    """Whatever of a tree waits in host memory in the device's own; traced."""

    def moved(x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x

    return jax.tree.map(moved, tree)
