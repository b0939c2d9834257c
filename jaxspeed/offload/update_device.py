"""Where the update of offloaded state runs: on the device or on the host's cores.

The device's cores read it once it has come to the device. The host's read it where it lies, inside
of the same compiled program (`compute_on`), and what they need of the device goes to them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import compute_on as _compute_on
from jax.sharding import NamedSharding

from jaxspeed.placement.memory_kinds import in_host, to_device, to_host

# With the memory of the results said; jax 0.12 has that function under the plain name.
_on: Any = getattr(_compute_on, "compute_on2", _compute_on.compute_on)


class UpdateDevice(NamedTuple):
    """Those of the device or those of the host."""

    bring: Callable[[jax.Array, NamedSharding], jax.Array]  # into the memory that they read
    compute: Callable[[Callable[..., Any]], Callable[..., Any]]  # the function, as run by them
    of_host: bool

    def brought(self, x: jax.Array, at: NamedSharding) -> jax.Array:
        """What is stored so in the memory that these cores read; traced."""
        return x if in_host(at) == self.of_host else self.bring(x, at)

    def put_back(self, x: jax.Array, at: NamedSharding) -> jax.Array:
        """What they made, in the memory where it is stored; traced."""
        if in_host(at) == self.of_host:
            return x
        return to_host(x, at) if in_host(at) else to_device(x, at)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _by_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    run = _on(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)

    def moved(*args: Any) -> Any:
        return run(*jax.tree.map(_here, args))

    return moved


def _here(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Host)


OF_DEVICE = UpdateDevice(to_device, _as_it_is, of_host=False)
OF_HOST = UpdateDevice(to_host, _by_the_host, of_host=True)
