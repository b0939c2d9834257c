"""Classifiers and reward models of Llama's blocks: scores of the last token, in place of a head.

A batch has `tokens` [batch, seq], padded at their ends, and `labels` [batch]. The last token is the
last one that is not the config's padding or, with a `mask` [batch, seq], the last one that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import classification, llama
from .classification import label_loss
from .decoder import TINY, RotaryDecoder, rms_norm
from .layers import Linear


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes, and the number of scores."""

    num_labels: int = 2  # 1: a real number, such as a reward
    pad_token_id: int | None = None


PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, num_labels=3, pad_token_id=0),
    "tiny-reward": Config(**TINY, num_labels=1, pad_token_id=0),
}


class Classifier(RotaryDecoder):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        headless = replace(config, tie_word_embeddings=True)
        rotaries = (config.rotary,)
        super().__init__(
            headless, llama.block, rms_norm, rotaries=rotaries, second=config.second, rngs=rngs
        )
        self.config = config
        sizes = {"embed": config.hidden_size}, {"classes": config.num_labels}
        self.score = Linear(*sizes, init=config.init, bias=False, rngs=rngs)

    def __call__(  # type: ignore[override]
        self, tokens: jax.Array, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Scores [batch, classes] of tokens [batch, seq]."""
        padding = self.config.pad_token_id
        if mask is None and padding is not None:
            mask = tokens != padding
        numbers = jnp.arange(tokens.shape[1])
        last = jnp.max(numbers if mask is None else numbers * (mask != 0), axis=-1, keepdims=True)
        at = jnp.broadcast_to(last, (len(tokens), 1))[..., None]
        return self.score(jnp.take_along_axis(self.hidden(tokens), at, axis=1)[:, 0])


def build(config: Config, rngs: nnx.Rngs) -> Classifier:
    return Classifier(config, rngs=rngs)


def loss(model: Classifier, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
    """(sum, weight) of `labels` [batch], or real ones [batch, classes]; see `label_loss`."""
    return label_loss(model(batch["tokens"], mask=batch.get("mask")), batch["labels"], train)


objective = classification.objective
