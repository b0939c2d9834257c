"""Attention masks: the static part (causal, window) and the dynamic part (segments)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Mask:
    """The static part: query i sees key j if j <= i when `causal` and |i - j| < `window`."""

    causal: bool
    window: int | None

    def sides(self) -> tuple[int, int] | None:
        """Visible keys to the (left, right) of a query, without itself; None without a window."""
        if self.window is None:
            return None
        return self.window - 1, 0 if self.causal else self.window - 1

    @property
    def hides(self) -> bool:
        """Whether some query does not see some key."""
        return self.causal or self.window is not None

    def dense(self, seq: int, kv_seq: int) -> jax.Array:
        """[seq, kv_seq], True where the query sees the key."""
        return self.between(range(seq), range(kv_seq))

    def between(self, queries: range, keys: range) -> jax.Array:
        """[queries, keys], True where the query sees the key."""
        rows, columns = (
            jnp.arange(positions.start, positions.stop) for positions in (queries, keys)
        )
        distance = rows[:, None] - columns
        seen = distance >= 0 if self.causal else jnp.ones_like(distance, bool)
        return seen if self.window is None else seen & (jnp.abs(distance) < self.window)

    def visible(self, first: Any, last: Any, kv_seq: int) -> tuple[Any, Any]:
        """The (first, last) key that any of the queries from `first` to `last` may see."""
        xp = jnp if isinstance(first, jax.Array) else np
        lowest, highest = xp.zeros_like(first), xp.full_like(last, kv_seq - 1)
        if self.causal:
            highest = xp.minimum(highest, last)
        if self.window is not None:
            lowest = xp.maximum(lowest, first - self.window + 1)
            highest = xp.minimum(highest, last + self.window - 1)
        return lowest, highest

    def seen_by(self, first: Any, last: Any, seq: int) -> tuple[Any, Any]:
        """The (first, last) query that may see any of the keys from `first` to `last`."""
        xp = jnp if isinstance(first, jax.Array) else np
        lowest, highest = xp.zeros_like(first), xp.full_like(last, seq - 1)
        if self.causal:
            lowest = xp.maximum(lowest, first)
        if self.window is not None:
            lowest = xp.maximum(lowest, first - self.window + 1)
            highest = xp.minimum(highest, last + self.window - 1)
        return lowest, highest

    def blocks(
        self, seq: int, kv_seq: int, block_q: int, block_kv: int, offset: int = 0
    ) -> tuple[int, int]:
        """(blocks of the scores with any visible key, all blocks); query i is at `offset + i`.

        Of blocks of one query and one key, the first is the number of visible scores.
        """
        first = np.arange(0, seq, block_q)
        last = np.minimum(first + block_q, seq) - 1
        lowest, highest = self.visible(offset + first, offset + last, kv_seq)
        seen = np.maximum(highest // block_kv - lowest // block_kv + 1, 0) * (highest >= lowest)
        return int(seen.sum()), len(first) * -(-kv_seq // block_kv)

    def most_beside(self, block: int, other: int, count: int) -> int:
        """The most of `count` blocks of `other` keys that `block` queries see, at any offset.

        Or of queries that see keys.
        """
        if self.window is None:
            return count
        span = block + (self.window - 1) * (1 if self.causal else 2)
        return min(count, (span - 2) // other + 2)

    def share(self, seq: int, kv_seq: int) -> float:
        """The unmasked fraction of the scores."""
        seen, every = self.blocks(seq, kv_seq, 1, 1)
        return seen / every


def computes_blocks(count: int) -> Any:
    """Scope for tracing a kernel that computes `count` blocks of the last two dims of its grid.

    The number does not follow from the grid: kernels skip blocks, and shrink it for sparse masks.
    """
    return jax.named_scope(f"computes_{count}_blocks")


def computed_blocks(scopes: str) -> int | None:
    """The count of `computes_blocks` in the scope names around a kernel."""
    counts = re.findall(r"computes_(\d+)_blocks", scopes)
    return int(counts[-1]) if counts else None


def computes_flops(count: int) -> Any:
    """Scope for tracing a kernel that Mosaic GPU compiles: its own products do not show theirs."""
    return jax.named_scope(f"computes_{count}_flops")


def computed_flops(scopes: str) -> int | None:
    """The count of `computes_flops` in the scope names around a kernel."""
    counts = re.findall(r"computes_(\d+)_flops", scopes)
    return int(counts[-1]) if counts else None


NOT_ESTIMATED = "not_estimated_branch"


def not_estimated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A branch of a `cond` that is rare or takes less: estimates are of the other branch."""
    return jax.named_scope(NOT_ESTIMATED)(fn)


@dataclass(frozen=True)
class KernelCall:
    """What is static in a call of an attention kernel: how scores follow from queries and keys.

    `interpret` runs the kernel without its platform, slowly.
    """

    mask: Mask
    scale: float
    soft_cap: float | None = None
    interpret: bool = False


class Segments(NamedTuple):
    """The dynamic part: a query sees only the keys of its segment."""

    q: jax.Array  # [batch, seq]
    kv: jax.Array  # [batch, kv_seq]

    def same(self) -> jax.Array:
        """[batch, seq, kv_seq], True where query and key share a segment."""
        return self.q[:, :, None] == self.kv[:, None, :]
