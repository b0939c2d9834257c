"""Pairs of completions in rows of tokens, and sums over the tokens of each completion.

A row [seq] holds several pairs: the completions of pair p are the segments 2 p + 1 and 2 p + 2 of
`segment_ids`, each with its prompt. Segment 0 is padding. A model without segments gets a pair as
rows [2, seq] of a batch [batch, 2, seq], without `segment_ids`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def most_pairs(seq_len: int, pairs_per_row: int | None = None) -> int:
    """The pairs of which a row of so many tokens has room."""
    return pairs_per_row or max(4, seq_len // 64)


@dataclass(frozen=True)
class PairRows:
    """The completions of a batch's pairs.

    Attributes:
      batch: as a model reads it: arrays [rows, seq].
      membership: fp32 [rows, seq, completions]: 1 where an input token is of a completion; None
        for pairs as rows [2, seq].
    """

    batch: Mapping[str, jax.Array]
    membership: jax.Array | None

    def sums(self, values: jax.Array) -> jax.Array:
        """The sums [batch, pairs, 2] over completions of values [rows, seq] of their targets.

        A target belongs to the completion of the token that predicts it.
        """
        if self.membership is None:
            return values.sum(-1).reshape(-1, 1, 2)
        # No matmul, which devices may compute in lower precision.
        sums = jnp.sum(values[..., None] * self.membership, axis=1)
        return sums.reshape(len(sums), -1, 2)

    def least(self, values: jax.Array, highest: int) -> jax.Array:
        """The least [batch, pairs, 2] over completions of integers [rows, seq] up to `highest`."""
        if self.membership is None:
            return values.min(-1).reshape(-1, 1, 2)
        least = jnp.min(jnp.where(self.membership > 0, values[..., None], highest), axis=1)
        return least.reshape(len(least), -1, 2)

    def spread(self, values: jax.Array) -> jax.Array:
        """Values [batch, pairs, 2] at the tokens of their completions: [rows, seq]."""
        if self.membership is None:
            return jnp.repeat(values.reshape(-1, 1), self._length, axis=1)
        return jnp.sum(values.reshape(len(values), 1, -1) * self.membership, axis=-1)

    @property
    def _length(self) -> int:
        return self.batch["tokens"].shape[1] - ("targets" not in self.batch)


def pair_rows(batch: Mapping[str, jax.Array], pairs_per_row: int | None = None) -> PairRows:
    """The pairs of a batch in either form."""
    if batch["tokens"].ndim == 3:
        return PairRows(
            {k: x.reshape(-1, *x.shape[2:]) if x.ndim > 2 else x for k, x in batch.items()}, None
        )
    inputs = slice(None) if "targets" in batch else slice(None, -1)
    segments = batch["segment_ids"][:, inputs]
    numbers = 1 + jnp.arange(2 * most_pairs(segments.shape[1], pairs_per_row))
    return PairRows(batch, (segments[..., None] == numbers).astype(jnp.float32))
