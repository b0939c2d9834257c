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
      samples: of the batch: its rows, or the pairs of rows [2, seq].
      membership: fp32 [rows, seq, completions]: 1 where an input token is of a completion.
    """

    batch: Mapping[str, jax.Array]
    samples: int
    membership: jax.Array

    def sums(self, values: jax.Array) -> jax.Array:
        """The sums [batch, pairs, 2] over completions of values [rows, seq] of their targets.

        A target belongs to the completion of the token that predicts it.
        """
        # No matmul, which devices may compute in lower precision.
        sums = jnp.sum(values[..., None] * self.membership, axis=1)
        return sums.reshape(self.samples, -1, 2)

    def least(self, values: jax.Array, highest: int) -> jax.Array:
        """The least [batch, pairs, 2] over completions of integers [rows, seq] up to `highest`."""
        least = jnp.min(jnp.where(self.membership > 0, values[..., None], highest), axis=1)
        return least.reshape(self.samples, -1, 2)

    def spread(self, values: jax.Array) -> jax.Array:
        """Values [batch, pairs, 2] at the tokens of their completions: [rows, seq]."""
        return jnp.sum(values.reshape(len(self.membership), 1, -1) * self.membership, axis=-1)


def pair_rows(batch: Mapping[str, jax.Array], pairs_per_row: int | None = None) -> PairRows:
    """The pairs of a batch in either form."""
    tokens = batch["tokens"]
    seq = tokens.shape[-1] - ("targets" not in batch)
    if tokens.ndim == 3:
        rows = {k: x.reshape(-1, *x.shape[2:]) if x.ndim > 2 else x for k, x in batch.items()}
        return PairRows(rows, len(tokens), jnp.ones((2 * len(tokens), seq, 1), jnp.float32))
    numbers = 1 + jnp.arange(2 * most_pairs(seq, pairs_per_row))
    membership = batch["segment_ids"][:, :seq, None] == numbers
    return PairRows(batch, len(tokens), membership.astype(jnp.float32))
