"""What crosses between workers and servers, and the only door through which it does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax

Way = Literal["up", "down"]


@dataclass
class Traffic:
    """Bytes that were sent, by worker; `order` tells in which order transfers were begun."""

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)
    order: list[tuple[Way, int, str]] = field(default_factory=list)  # of the step of now

    def send(
        self,
        way: Way,
        worker: int,
        what: str,
        arrays: Sequence[jax.Array],
        to: Sequence[jax.Device],
    ) -> list[jax.Array]:
        """Each array to its device. Nothing waits for it."""
        (self.up if way == "up" else self.down)[worker] += sum(x.nbytes for x in arrays)
        self.order.append((way, worker, what))
        sent: list[jax.Array] = jax.device_put(list(arrays), list(to))
        return sent

    def begin_step(self) -> None:
        self.order.clear()
