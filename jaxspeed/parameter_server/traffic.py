"""Transfers between workers and servers, with a count of their bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxspeed.communication import PUSH, Communication


@dataclass
class Traffic:
    """Bytes sent, by worker; `order` has the transfers of the current step in order of dispatch."""

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)
    order: list[Communication] = field(default_factory=list)  # of the current step

    def send(
        self,
        kind: str,
        worker: int,
        purpose: str,
        arrays: Sequence[jax.Array],
        to: Sequence[jax.Device],
    ) -> list[jax.Array]:
        """Send each array to its device, without blocking."""
        sizes = [(x.size, x.dtype) for x in arrays]
        one = Communication.of_arrays(
            kind, (), sizes, 1, source="run", purpose=purpose, site=f"worker {worker}"
        )
        (self.up if kind == PUSH else self.down)[worker] += one.bytes
        self.order.append(one)
        sent: list[jax.Array] = jax.device_put(list(arrays), list(to))
        return sent

    def begin_step(self) -> None:
        self.order.clear()


def one_copy(tree: Any, device: jax.Device) -> Any:
    """Copy replicated arrays to another device.

    From one shard: `device_put` of an array on a mesh leaves that mesh in its type (jax 0.10.2).
    """
    return jax.tree.map(lambda x: jax.device_put(x.addressable_shards[0].data, device), tree)
