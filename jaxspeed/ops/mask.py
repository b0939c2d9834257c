"""Which key a query may see, in the two parts that kernels tell apart: positions and segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Mask:
    """The static part: query i sees key j if j <= i when `causal` and |i - j| < `window`."""

    causal: bool
    window: int | None

    def sides(self) -> tuple[int, int] | None:
        """How far a query sees to the (left, right), itself not counted; None without a window."""
        if self.window is None:
            return None
        return self.window - 1, 0 if self.causal else self.window - 1

    def dense(self, seq: int, kv_seq: int) -> jax.Array:
        """[seq, kv_seq], True where the query sees the key."""
        distance = jnp.arange(seq)[:, None] - jnp.arange(kv_seq)
        seen = distance >= 0 if self.causal else jnp.ones_like(distance, bool)
        return seen if self.window is None else seen & (jnp.abs(distance) < self.window)


class Segments(NamedTuple):
    """The dynamic part: a query sees the keys of its own segment."""

    q: jax.Array  # [batch, seq]
    kv: jax.Array  # [batch, kv_seq]

    def same(self) -> jax.Array:
        """[batch, seq, kv_seq], True where query and key share a segment."""
        return self.q[:, :, None] == self.kv[:, None, :]
