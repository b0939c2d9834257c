"""Language models' batch format, logits and next-token loss.

A batch is a mapping:

| key | shape | meaning |
|---|---|---|
| tokens | [batch, seq + 1] | each token but the last predicts the next one |
| targets | [batch, seq] | optional: the predicted tokens; then tokens is [batch, seq] |
| segment_ids | as tokens | optional, packed documents: no attention and no prediction across them |
| positions | as tokens | optional, by default 0, 1, 2, ... along the sequence |
| mask | as the targets, or as tokens | optional: targets where it is 0 are ignored |

Targets of -100 are ignored too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed import ops

from .layers import Embedding

IGNORED = -100

LanguageBatch = Mapping[str, jax.Array]


class Head(Protocol):
    """What logits are computed with from the hidden states."""

    @property
    def head_weight(self) -> jax.Array: ...

    @property
    def vocab_chunk(self) -> int | None: ...

    @property
    def logit_soft_cap(self) -> float | None: ...


class LanguageModel(Head, Protocol):
    """Interface for a loss without full logits: hidden states and the head's weight."""

    def hidden(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array: ...


class Decoder(nnx.Module):
    """Base class of language models: a head that may be tied, and logits.

    A family's class creates the layers and defines `hidden`.
    """

    config: Any
    embed: Embedding
    head: Embedding | None  # None: tied to the embedding

    @property
    def head_weight(self) -> jax.Array:
        """[vocab, embed]."""
        return (self.embed if self.head is None else self.head).table[...]

    @property
    def vocab_chunk(self) -> int | None:
        return self.config.vocab_chunk

    @property
    def logit_soft_cap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    def __call__(
        self: LanguageModel,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        at: jax.Array | None = None,
        **context: jax.Array | None,
    ) -> jax.Array:
        """Logits [batch, seq, vocab] in fp32; `positions` and `context` as in `hidden`.

        With `at` [batch], those of one token of each sequence, [batch, 1, vocab].
        """
        return logits(self, self.hidden(tokens, positions=positions, **context), at)


def objective(config: Any) -> str:
    return "next_token"


def next_token_loss(model: LanguageModel, batch: LanguageBatch) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of the cross-entropy of each token's successor."""
    p = ops.split_batch(batch)
    hidden = model.hidden(p.tokens, segment_ids=p.segment_ids, positions=p.positions)
    return cross_entropy(model, hidden, p.targets)


def cross_entropy(
    model: Head, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of the cross-entropy of `targets`, from the head's input."""
    return ops.linear_cross_entropy(
        hidden,
        model.head_weight,
        targets,
        ignore_index=IGNORED,
        soft_cap=model.logit_soft_cap,
        chunk=model.vocab_chunk,
    )


def logits(model: Head, hidden: jax.Array, at: jax.Array | None = None) -> jax.Array:
    """hidden [batch, seq, embed] to logits [batch, seq, vocab], in fp32.

    With `at` [batch], those of one token of each sequence, [batch, 1, vocab].
    """
    if at is not None:
        hidden = jnp.take_along_axis(hidden, at[:, None, None], axis=1)
    weight = model.head_weight
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("bse,ve->bsv", hidden, weight, preferred_element_type=dtype)
    cap = model.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
