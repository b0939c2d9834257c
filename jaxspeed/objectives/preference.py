"""Objectives of pairs of a chosen and a rejected completion: DPO, CPO with SimPO, and ORPO.

Their keys, defaults, formulas and metrics are those of TRL's configs of 1.16. A pair's completions
are segments of one row (`pairs.py`); a loss is a sum over pairs, or over tokens of the chosen ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspeed.config.objective_options import (
    CompletionOptions,
    CpoOptions,
    DpoOptions,
    PairOptions,
    ReferenceOptions,
)
from jaxspeed.objectives.base_objective import Objective, Records
from jaxspeed.objectives.completions import Completions, completions, summed, token_metrics
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.model_logprobs import model_logprobs
from jaxspeed.objectives.padding import without_weight
from jaxspeed.objectives.pair_losses import (
    CPO_LOSSES,
    DIVERGENCES,
    PAIR_LOSSES,
    Pairs,
    log_odds_ratio,
)
from jaxspeed.objectives.pairs import pair_rows
from jaxspeed.objectives.terms_and_metrics import Mean, Metric

REFERENCE = "reference_logprobs"
CHOSEN, REJECTED = 0, 1


class OfPairs(Objective):
    """What objectives of pairs of completions share."""

    Options: Any = PairOptions
    arrays: ClassVar = {
        "segment_ids": "as tokens: 2 p + 1 and 2 p + 2 are the completions of pair p, each after "
        "its prompt; 0 is padding",
        "positions": "as tokens, optional: of each completion from 0 on",
    }
    records: Records = "preference"
    without_weight = staticmethod(without_weight)

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.dropout = not self.options.disable_dropout


class OfCompletions(OfPairs):
    """What objectives of completions' log-probabilities share."""

    Options: Any = CompletionOptions
    arrays: ClassVar = {
        "tokens": "[batch, seq + 1]; with targets [batch, seq]; of a model without segments "
        "[batch, 2, seq + 1]",
        "targets": "[batch, seq], optional: what is predicted",
        **OfPairs.arrays,
        "mask": "as tokens: 1 at the tokens of completions",
    }


class AgainstReference(OfCompletions):
    """What objectives with a reference model share."""

    Options: Any = ReferenceOptions
    arrays: ClassVar = {
        **OfCompletions.arrays,
        REFERENCE: "[batch, seq] fp32: the reference's, of the targets; computed if it is absent",
    }
    in_fp32: ClassVar[tuple[str, ...]] = (REFERENCE,)

    def computed(self) -> Sequence[ComputedArrays]:
        once = self.options.reference == "precompute"
        how: dict[str, Any] = {"model": "reference", "once": once, "by_sample": True}
        return [ComputedArrays("reference", (REFERENCE,), reference_logprobs, **how)]


def reference_logprobs(model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The log-probabilities of a batch's targets: [batch, seq], or [batch, 2, seq]."""
    of_tokens = model_logprobs(model, pair_rows(batch).batch, train=False).of_tokens
    lead = batch["tokens"].shape[:-1]
    return {REFERENCE: of_tokens.logprobs.reshape(*lead, -1)}


class Dpo(AgainstReference):
    """Direct preference optimization: a pair's difference of log-ratios to a reference."""

    Options: Any = DpoOptions

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        o = self.options
        c = completions(model, batch, o.pairs_per_row, train)
        weights = 1.0 if o.ld_alpha is None else c.shared_weights(o.ld_alpha)
        ratios = c.log_ratios(batch[REFERENCE], weights)
        score = DIVERGENCES[o.f_divergence_type](ratios, o.f_alpha_divergence_coef)
        pairs = Pairs(
            *(x[..., side] for x in (ratios, score, c.tokens) for side in (CHOSEN, REJECTED))
        )
        terms = dict[str, tuple[Any, ...]]()
        for name, weight in zip(o.loss_type, o.loss_weights or [1.0] * len(o.loss_type)):
            if name == "sft":
                terms[name] = *c.likelihood, weight
            else:
                terms[name] = c.of_pairs(PAIR_LOSSES[name](pairs, o)), c.pairs, weight
        logps = c.rows.sums(weights * c.logprobs) if o.ld_alpha is not None else c.logps
        return summed(terms, preference_metrics(c, o.beta * ratios, logps), c.scored)


class Cpo(OfCompletions):
    """Contrastive preference optimization, and SimPO, without a reference."""

    Options: Any = CpoOptions

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        o = self.options
        c = completions(model, batch, o.pairs_per_row, train)
        logps = c.logps_by_token if o.loss_type in ("ipo", "simpo") else c.logps
        losses = CPO_LOSSES[o.loss_type](logps[..., CHOSEN] - logps[..., REJECTED], o)
        terms = {
            "preference_loss": (c.of_pairs(losses), c.pairs),
            "nll_loss": (*c.likelihood, o.cpo_alpha),
        }
        return summed(terms, preference_metrics(c, o.beta * logps, logps), c.scored)


class Orpo(OfCompletions):
    """Odds ratio preference optimization: the chosen text's likelihood, and a pair's odds ratio."""

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        o = self.options
        c = completions(model, batch, o.pairs_per_row, train, prompts=True)
        logps = jnp.where(c.tokens > 0, c.logps_by_token, -1.0)
        log_odds = log_odds_ratio(logps[..., CHOSEN], logps[..., REJECTED])
        ratio = jax.nn.log_sigmoid(log_odds)
        terms = {
            "nll_loss": c.likelihood,
            "preference_loss": (-o.beta * c.of_pairs(ratio), c.pairs),
        }
        metrics = {
            "log_odds_ratio": Mean(c.of_pairs(ratio), c.pairs),
            "log_odds_chosen": Mean(c.of_pairs(log_odds), c.pairs),
        }
        metrics |= preference_metrics(c, o.beta * logps, logps)
        return summed(terms, metrics, c.scored)


def preference_metrics(c: Completions, rewards: jax.Array, logps: jax.Array) -> dict[str, Metric]:
    """Metrics of pairs, by TRL's names, for `summed`.

    Args:
      rewards, logps: [batch, pairs, 2].
    """
    chosen, rejected = (rewards[..., side] for side in (CHOSEN, REJECTED))
    is_chosen = jnp.broadcast_to(jnp.arange(2) == CHOSEN, rewards.shape)
    of_pairs = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(chosen.dtype),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[..., CHOSEN],
        "logps/rejected": logps[..., REJECTED],
    }
    return {
        **{name: Mean(c.of_pairs(x), c.pairs) for name, x in of_pairs.items()},
        **token_metrics(c, is_chosen, ~is_chosen),
    }
