"""Log-probabilities that a language model gives the targets of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxspeed import ops
from jaxspeed.errors import ModelError
from jaxspeed.ops.next_tokens import IGNORED

# The batch's array of the distributions that tokens were drawn from: see `ops.token_logprobs`.
THRESHOLDS = "thresholds"
# That of a mixture's choices: int32 [batch, seq, routers, k]; see `traced_loss/router_choices.py`.
ROUTING = "routing"


class ModelLogprobs(NamedTuple):
    """What a model says of a batch.

    Attributes:
      of_tokens: `ops.TokenLogprobs` of the targets [batch, seq], 0 where they do not count.
      next_tokens: the inputs and targets.
      auxiliary: of a mixture, the losses of its routers with their coefficients.
      metrics: of a mixture.
    """

    of_tokens: ops.TokenLogprobs
    next_tokens: ops.NextTokens
    auxiliary: jax.Array | None
    metrics: Mapping[str, jax.Array]

    @property
    def counted(self) -> jax.Array:
        """Which targets count: bool [batch, seq]."""
        return self.next_tokens.targets != IGNORED


class HeadInput(NamedTuple):
    """What a decoder computes before its head; `ModelLogprobs` has the rest."""

    hidden: jax.Array  # [batch, seq, embed]
    auxiliary: jax.Array | None
    metrics: Mapping[str, jax.Array]


def head_input(model: Any, p: ops.NextTokens, train: bool | None = None) -> HeadInput:
    """The hidden states of a family's decoder; `train` as in `model_logprobs`."""
    context = {"segment_ids": p.segment_ids, "positions": p.positions}
    if hasattr(model, "hidden_and_auxiliary"):
        return HeadInput(*model.hidden_and_auxiliary(p.tokens, train=train, **context))
    return HeadInput(model.hidden(p.tokens, **context), None, {})


def model_logprobs(
    model: Any, batch: Mapping[str, jax.Array], *, train: bool | None = None, **requests: Any
) -> ModelLogprobs:
    """The log-probabilities of a batch's targets, without all logits where the model has a head.

    Args:
      model: a family's decoder, or one that returns logits [batch, seq, vocab].
      batch: as of `models/language.py`; it may have THRESHOLDS [batch, seq], in fp32.
      train: whether a mixture counts its experts' tokens; not if False.
      requests: `temperature`, `entropy`, `is_top` and `mean_logit` of `ops.token_logprobs`.
    """
    p = ops.split_batch(batch)
    requests["thresholds"] = batch.get(THRESHOLDS)
    if hasattr(model, "head_weight"):
        hidden, auxiliary, metrics = head_input(model, p, train)
        options = {"soft_cap": model.logit_soft_cap, "chunk": model.vocab_chunk}
        scored = ops.token_logprobs(hidden, model.head_weight, p.targets, **options, **requests)
        return ModelLogprobs(scored, p, auxiliary, metrics)
    context = {"segment_ids": p.segment_ids, "positions": p.positions}
    passed = {name: x for name, x in context.items() if x is not None}
    accepted = call_parameters(model)
    any_name = any(x.kind is x.VAR_KEYWORD for x in accepted.values())
    if unread := [name for name in passed if name not in accepted and not any_name]:
        raise ModelError(
            f"the batch has {' and '.join(unread)}, which the model does not take: it should be "
            "called as model(tokens, segment_ids=..., positions=...), or get rows of one document"
        )
    logits = model(p.tokens, **passed)
    logits = logits[0] if isinstance(logits, tuple) else logits
    shape = getattr(logits, "shape", None)
    if shape is None or len(shape) != 3 or shape[:2] != p.tokens.shape:
        raise ModelError(
            f"log-probabilities are read from model(tokens), which returned {shape or type(logits)}"
            f" for tokens {p.tokens.shape}: a language model returns logits [batch, seq, vocab]"
        )
    return ModelLogprobs(ops.logit_logprobs(logits, p.targets, **requests), p, None, {})


def call_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of the call of a model as a loss gets it."""
    call = getattr(model, "calls", None) or type(getattr(model, "module", model)).__call__
    return inspect.signature(call).parameters
