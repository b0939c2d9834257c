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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jaxspeed import ops
from jaxspeed.errors import ModelError

from .classification import label_loss
from .layers import Embedding, Linear

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


@dataclass(frozen=True)
class DecoderHead:
    """Fields of a decoder's config: with labels it is a classifier of sequences, without a head."""

    num_labels: int | None = None  # 1: a real number, such as a reward
    pad_token_id: int | None = None  # scores are those of the last other token


class Decoder(nnx.Module):
    """Base class of language models: a head that may be tied, and logits.

    A family's class creates the layers and defines `hidden`. As a classifier of sequences it has
    scores of the last token, in place of a head.
    """

    config: Any
    embed: Embedding
    head: Embedding | None  # None: tied to the embedding
    score: Linear | None = None
    hidden: Callable[..., jax.Array]

    def add_head(self, init: Initializer, rngs: nnx.Rngs) -> None:
        """Create the layer after `hidden`: a head unless it is tied, or that of scores."""
        c, outputs = self.config, self.config.num_labels
        has_head = outputs is None and not c.tie_word_embeddings
        self.head = (
            Embedding(c.vocab_size, c.hidden_size, init=init, rngs=rngs) if has_head else None
        )
        sizes = {"embed": c.hidden_size}, {"classes": outputs}
        self.score = outputs and Linear(*sizes, init=init, bias=False, rngs=rngs)

    @property
    def head_weight(self) -> jax.Array:
        """[vocab, embed]."""
        if self.score is not None:
            raise ModelError("a classifier has scores of sequences, and no logits of tokens")
        return (self.embed if self.head is None else self.head).table[...]

    @property
    def vocab_chunk(self) -> int | None:
        return self.config.vocab_chunk

    @property
    def logit_soft_cap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        at: jax.Array | None = None,
        mask: jax.Array | None = None,
        **context: jax.Array | None,
    ) -> jax.Array:
        """Logits [batch, seq, vocab] in fp32; `positions` and `context` as in `hidden`.

        With `at` [batch], those of one token of each sequence, [batch, 1, vocab].

        As a classifier scores [batch, classes], of the last token that is not padding or, with a
        `mask` [batch, seq], of the last one that it has.
        """
        hidden = self.hidden(tokens, positions=positions, **context)
        if self.score is None:
            return logits(self, hidden, at)
        padding = self.config.pad_token_id
        if mask is None and padding is not None:
            mask = tokens != padding
        numbers = jnp.arange(tokens.shape[1])
        last = jnp.max(numbers if mask is None else numbers * (mask != 0), axis=-1, keepdims=True)
        last = jnp.broadcast_to(last, (len(tokens), 1))[..., None]
        return self.token_scores(jnp.take_along_axis(hidden, last, axis=1))[:, 0]

    def token_scores(self, hidden: jax.Array) -> jax.Array:
        """Scores [batch, seq, classes] of hidden states [batch, seq, embed], in fp32."""
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        assert self.score is not None, "a classifier"
        kernel = self.score.kernel[...]
        return jnp.einsum("bse,ec->bsc", hidden, kernel, preferred_element_type=dtype)


def is_classifier(config: Any) -> bool:
    """Whether it is the config of a decoder that is a classifier of sequences."""
    return isinstance(config, DecoderHead) and config.num_labels is not None


def objective(config: Any) -> str:
    return "classification" if is_classifier(config) else "next_token"


def classifier_loss(model: Decoder, batch: LanguageBatch, train: bool | None = None) -> Any:
    """(sum, weight) of `labels` [batch], or real ones [batch, classes]; see `label_loss`.

    `tokens` [batch, seq] are padded at their ends; `mask` [batch, seq] may have which count.
    """
    return label_loss(model(batch["tokens"], mask=batch.get("mask")), batch["labels"], train)


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
