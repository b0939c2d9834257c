"""What crosses between workers and servers, and the only door through which it does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxspeed.communication import PUSH, Communication


@dataclass
class Traffic:
    """Bytes that were sent, by worker; `order` tells in which order transfers were begun."""

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
        """Each array to its device. Nothing waits for it."""
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
    """What every server has, on another device.

    From one shard: `device_put` of an array on a mesh leaves that mesh in its type (jax 0.10.2).
    """
    return jax.tree.map(lambda x: jax.device_put(x.addressable_shards[0].data, device), tree)
