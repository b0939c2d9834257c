"""What a model says of the completions of a batch, as sums over the tokens of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxspeed.objectives.model_logprobs import HeadInput, ModelLogprobs, model_logprobs
from jaxspeed.objectives.pairs import PairRows, pair_rows
from jaxspeed.objectives.terms_and_metrics import Mean, Metric, Terms
from jaxspeed.ops.next_tokens import IGNORED, split_batch


@dataclass(frozen=True)
class Completions:
    """A model's log-probabilities of the completions of a batch.

    Attributes:
      rows: the pairs of the batch.
      scored: of its targets: those of completions, or of all tokens.
      counted: bool [rows, seq]: the targets that are of completions.
    """

    rows: PairRows
    scored: ModelLogprobs
    counted: jax.Array

    @cached_property
    def logprobs(self) -> jax.Array:
        """Of each token of a completion, [rows, seq]; 0 elsewhere."""
        return jnp.where(self.counted, self.scored.of_tokens.logprobs, 0)

    @cached_property
    def logps(self) -> jax.Array:
        """Log-probabilities of completions, [batch, pairs, 2]."""
        return self.rows.sums(self.logprobs)

    @cached_property
    def tokens(self) -> jax.Array:
        """Numbers of tokens of completions, fp32 [batch, pairs, 2]."""
        return self.rows.sums(self.counted.astype(jnp.float32))

    def firsts(self, marks: jax.Array) -> jax.Array:
        """The marks [batch, pairs] at the first token of each pair, as tokens in the batch."""
        of_rows = marks.reshape(-1, marks.shape[-1])[:, : self.counted.shape[1]]
        return self.rows.sums(of_rows.astype(jnp.float32))[..., 0]

    def log_ratios(self, reference: jax.Array, weights: Any = 1.0) -> jax.Array:
        """Log-ratios [batch, pairs, 2] to a reference's log-probabilities of the targets.

        Args:
          reference: as the batch has it.
          weights: of tokens, [rows, seq].
        """
        of_tokens = self.logprobs - reference.reshape(self.counted.shape)
        return self.rows.sums(jnp.where(self.counted, weights * of_tokens, 0))

    @property
    def logps_by_token(self) -> jax.Array:
        """Mean log-probabilities of a token, [batch, pairs, 2]."""
        return self.logps / jnp.maximum(self.tokens, 1)

    @cached_property
    def is_pair(self) -> jax.Array:
        """Which pairs are there: bool [batch, pairs]."""
        return jnp.any(self.tokens > 0, axis=-1)

    @cached_property
    def pairs(self) -> jax.Array:
        """The weights of a loss of pairs: 1 for each, [batch, pairs]."""
        return self.is_pair.astype(jnp.float32)

    def of_pairs(self, values: jax.Array) -> jax.Array:
        """Values [batch, pairs], 0 where there is no pair."""
        return jnp.where(self.is_pair, values, 0)

    @property
    def likelihood(self) -> tuple[jax.Array, jax.Array]:
        """(values, weights) of the negative log-likelihood of the scored tokens of chosen ones."""
        scored = self.rows.sums(self.scored.counted.astype(jnp.float32))[..., 0]
        total = self.rows.sums(self.scored.of_tokens.logprobs)[..., 0]
        return -self.of_pairs(total), self.of_pairs(scored)

    def shared_weights(self, beyond: float) -> jax.Array:
        """Weights [rows, seq] of tokens: 1, and `beyond` for those after the shorter completion."""
        places = self.scored.next_tokens.places
        far = jnp.iinfo(jnp.int32).max
        first = self.rows.least(jnp.where(self.counted, places, far), far)
        shorter = jnp.min(self.tokens, axis=-1, keepdims=True)
        end = first + jnp.broadcast_to(shorter, first.shape)  # a completion is contiguous
        return jnp.where(places < self.rows.spread(end), 1.0, beyond)


def summed(
    terms: Mapping[str, tuple[Any, ...]],
    metrics: Mapping[str, Metric],
    scored: HeadInput | ModelLogprobs,
) -> tuple[Terms, dict[str, Any]]:
    """The result of a loss function, with those of a mixture's routers.

    Args:
      terms, metrics: whose sums and weights are still of each pair, [batch, pairs].
    """
    of_terms = {name: parts[:2] for name, parts in terms.items()}
    leaves, tree = jax.tree.flatten((of_terms, stop_gradient(dict(metrics))))
    # One sum, so that devices all-reduce all at once. (Two independent collectives can deadlock the
    # simulated devices of XLA:CPU.)
    sums = jnp.sum(jnp.stack(leaves), axis=(1, 2))
    of_terms, means = jax.tree.unflatten(tree, [*sums])
    loss = Terms({name: (*of_terms[name], *parts[2:]) for name, parts in terms.items()})
    if scored.auxiliary is not None:
        loss["aux_loss"] = scored.auxiliary, None
    of_router = {n: x for n, x in scored.metrics.items() if n != "auxiliary_loss"}
    return loss, {**means, **of_router}


def completions(
    model: Any,
    batch: Mapping[str, jax.Array],
    pairs_per_row: int | None,
    train: bool | None,
    *,
    prompts: bool = False,
    statistics: bool = True,
) -> Completions:
    """Evaluate a model on the completions of a batch.

    Args:
      prompts: whether tokens of prompts are scored too.
      statistics: whether those of `token_metrics` are computed.
    """
    rows = pair_rows(batch, pairs_per_row)
    counted = split_batch(rows.batch).targets != IGNORED
    read = {**rows.batch, "mask": of_texts(rows.batch)} if prompts else rows.batch
    requests = dict.fromkeys(("entropy", "is_top", "mean_logit"), statistics)
    return Completions(rows, model_logprobs(model, read, train=train, **requests), counted)


def of_texts(batch: Mapping[str, jax.Array]) -> jax.Array:
    """A mask of prompts and completions."""
    if "segment_ids" in batch:
        return batch["segment_ids"] != 0
    # Of one text a row, which ends with its completion.
    return jax.lax.cummax(batch["mask"], axis=1, reverse=True) != 0


def token_metrics(c: Completions, chosen: jax.Array, rejected: jax.Array) -> dict[str, Metric]:
    """Means over tokens, by TRL's names, for `summed`.

    Args:
      chosen, rejected: which completions are: bool [batch, pairs, 2].
    """

    def mean(values: Any, which: jax.Array) -> Metric:
        of_completions = c.rows.sums(jnp.where(c.counted, values, 0).astype(jnp.float32))
        both = (jnp.where(which, x, 0).sum(-1) for x in (of_completions, c.tokens))
        return Mean(*both)

    of_tokens = c.scored.of_tokens
    return {
        "logits/chosen": mean(of_tokens.mean_logit, chosen),
        "logits/rejected": mean(of_tokens.mean_logit, rejected),
        "mean_token_accuracy": mean(of_tokens.is_top, chosen),
        "entropy": mean(of_tokens.entropy, chosen | rejected),
    }
