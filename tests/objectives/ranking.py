"""An objective of a user's own, with the model, loss and data that a config names beside it."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxspeed.models import gpt2
from jaxspeed.models.language import next_token_loss
from pydantic import Field

import jaxspeed

VOCAB, SEQ, PAIRS = 64, 8, 45  # of which 15 are held out
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
}


class Scored(nnx.Module):
    """A language model with a score of each sequence instead of logits."""

    def __init__(self, model: Any, *, rngs: nnx.Rngs):
        self.model = model
        self.score = nnx.Linear(model.config.hidden_size, 1, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [batch, seq] to scores [batch]."""
        return self.score(self.model.hidden(tokens)[:, -1])[:, 0]


class Ranking(jaxspeed.Objective):
    """-log sigmoid(score(chosen) - score(rejected)) of pairs."""

    class Options(jaxspeed.Objective.Options):
        beta: float = Field(1.0, gt=0, description="Multiplies the difference of scores.")

    arrays = {  # noqa: RUF012
        "pairs": "[batch, 2, seq]: the chosen tokens and the rejected ones",
        "weight": "[batch], optional: 0 for pairs that do not count",
    }

    def loss(self, model: Any, batch: Any) -> Any:
        pairs = batch["pairs"]
        scores = model(pairs.reshape(-1, pairs.shape[2])).reshape(-1, 2)
        return ranking_loss(self.options.beta * (scores[:, 0] - scores[:, 1]), batch.get("weight"))

    def without_weight(self, batch: Any, padding: np.ndarray) -> Any:
        return {**batch, "weight": np.where(padding, 0, 1).astype(np.float32)}

    def tokens(self, sample: Any) -> int:
        return int(sample["pairs"].size)

    def trained_model(self, model: Any) -> Any:
        return lambda rngs: Scored(model(rngs), rngs=rngs)


def ranking_loss(margins: jax.Array, weight: jax.Array | None) -> Any:
    """(sum, weight, the share of pairs in the right order) of margins [batch]."""
    weight = jnp.ones_like(margins) if weight is None else weight
    total = jnp.sum(weight)
    accuracy = jnp.sum(weight * (margins > 0)) / total
    return jnp.sum(weight * jax.nn.softplus(-margins)), total, {"accuracy": accuracy}


class EntireRanking(Ranking):
    """The same, declared to be of the entire micro-batch."""

    entire_batch = True


# By `model.factory` and `model.loss`.


def scored(*, rngs: nnx.Rngs) -> Scored:
    return Scored(gpt2.build(gpt2.Config(**SIZES), rngs), rngs=rngs)


def plain_loss(model: Any, batch: Any) -> Any:
    return Ranking().loss(model, batch)


class Pairs:
    """`data.source`: pairs of which the chosen one has smaller ids."""

    def __init__(self, count: int = PAIRS) -> None:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, VOCAB, (count, 2, SEQ)).astype(np.int32)
        self.pairs = np.sort(tokens, axis=1)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return ({"pairs": pair} for pair in self.pairs)


pairs = Pairs()


class Doubled(jaxspeed.Objective):
    """Twice the loss of next tokens, on the data of a language model."""

    arrays = {"tokens": "[batch, seq + 1]"}  # noqa: RUF012

    def loss(self, model: Any, batch: Any) -> Any:
        total, weight = next_token_loss(model, batch)
        return 2 * total, weight
