"""Where the update of offloaded state runs: on the device, or on the host's cores (`compute_on`).

On the device, the state is copied to device memory first. On the host, it is updated in place
inside of the same compiled program, and gradients are copied to host memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import compute_on as _compute_on
from jax.sharding import NamedSharding

from jaxspeed.placement.memory_kinds import in_host, to_device, to_host

# The version that takes the results' memory space; jax 0.12 has it under the plain name.
_on: Any = getattr(_compute_on, "compute_on2", _compute_on.compute_on)


class UpdateDevice(NamedTuple):
    """The processor that updates state: the device or the host."""

    move: Callable[[jax.Array, NamedSharding], jax.Array]  # into its memory
    compute: Callable[[Callable[..., Any]], Callable[..., Any]]  # wraps a function to run on it
    of_host: bool

    def fetch(self, x: jax.Array, at: NamedSharding) -> jax.Array:
        """Copy an array stored `at` into this processor's memory, if it is not there; traced."""
        return x if in_host(at) == self.of_host else self.move(x, at)

    def store(self, x: jax.Array, at: NamedSharding) -> jax.Array:
        """Copy a result to where it is stored, if that is other memory; traced."""
        if in_host(at) == self.of_host:
            return x
        return to_host(x, at) if in_host(at) else to_device(x, at)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    run = _on(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)

    def with_host_arguments(*args: Any) -> Any:
        return run(*jax.tree.map(_to_host_memory, args))

    return with_host_arguments


def _to_host_memory(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Host)


ON_DEVICE = UpdateDevice(to_device, _unchanged, of_host=False)
ON_HOST = UpdateDevice(to_host, _on_host, of_host=True)
