"""Inputs and targets of a language model's batch; `models/language.py` has its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

IGNORED = -100  # a target that does not count


class NextTokens(NamedTuple):
    """The inputs and targets of a batch."""

    tokens: jax.Array  # [batch, seq]
    targets: jax.Array  # [batch, seq]
    segment_ids: jax.Array | None  # [batch, seq]
    positions: jax.Array | None  # [batch, seq]

    @property
    def places(self) -> jax.Array:
        """The positions, by default 0, 1, 2, ..."""
        if self.positions is not None:
            return self.positions
        return jnp.broadcast_to(jnp.arange(self.tokens.shape[1]), self.tokens.shape)


def split_batch(batch: Mapping[str, jax.Array]) -> NextTokens:
    """The inputs and targets of a batch in any of its forms."""
    tokens, segments, mask = batch["tokens"], batch.get("segment_ids"), batch.get("mask")
    positions = batch.get("positions")
    if "targets" in batch:
        targets = batch["targets"]
    else:
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
        if segments is not None:
            targets = jnp.where(segments[:, 1:] == segments[:, :-1], targets, IGNORED)
            segments = segments[:, :-1]
        positions = positions if positions is None else positions[:, :-1]
    if mask is not None:
        targets = jnp.where(mask[:, -targets.shape[1] :] != 0, targets, IGNORED)
    return NextTokens(tokens, targets, segments, positions)
