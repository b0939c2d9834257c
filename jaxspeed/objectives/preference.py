"""Objectives of pairs of a chosen and a rejected completion: DPO, CPO with SimPO, and ORPO.

Their keys, defaults, formulas and metrics are those of TRL's configs of 1.16. A pair's completions
are segments of one row (`pairs.py`); a loss is a sum over pairs, or over tokens of the chosen ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.problems import Problem
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.config.schema import Settings
from jaxspeed.config.types import (
    Beta,
    Count,
    Flag,
    NonNegative,
    Number,
    Positive,
    Share,
    is_list,
)
from jaxspeed.config.verdicts import shown
from jaxspeed.objectives.base_objective import Objective, Records
from jaxspeed.objectives.completions import Completions, completions, summed, token_metrics
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.model_logprobs import model_logprobs
from jaxspeed.objectives.padding import without_weight
from jaxspeed.objectives.pair_losses import (
    CPO_LOSSES,
    DIVERGENCES,
    OF_DELTA,
    PAIR_LOSSES,
    Pairs,
    log_odds_ratio,
)
from jaxspeed.objectives.pairs import pair_rows
from jaxspeed.objectives.terms_and_metrics import Mean, Metric

REFERENCE = "reference_logprobs"
CHOSEN, REJECTED = 0, 1
_SORTED = "a type that is a sum over pairs: aot and aot_unpaired sort the pairs of a batch"


def _types(value: Any) -> Any:
    types = list(value) if is_list(value) else [value]
    if {"aot", "aot_unpaired"} & {x for x in types if isinstance(x, str)}:
        raise PydanticCustomError("sorted", "{needs}", {"needs": _SORTED})
    return types


def _no_weighting(value: Any) -> Any:
    if value is not False:
        needs = "false: WPO's weights are not computed here"
        raise PydanticCustomError("weighting", "{needs}", {"needs": needs})
    return value


def _without_effect(options: Any, key: str, of: str, actual: Sequence[str]) -> Iterator[Problem]:
    """Yield the problem of a key that acts in one type, where it is set without that type."""
    value, default = getattr(options, key), type(options).model_fields[key].default
    if of not in actual and value != default:
        works = f"It acts in {of} alone: remove it."
        yield Problem(f"objective.{key}", f"{value:g} with {', '.join(actual)}", works)


DpoType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
]


class OfPairs(Objective):
    """What objectives of pairs of completions share."""

    class Options(Objective.Options):
        disable_dropout: Flag = Field(True, description="The model and adapters have no dropout.")
        pairs_per_row: Count | None = Field(
            None,
            description="The most pairs that are packed into a row, by default one for 64 tokens, "
            "and at least 4.",
        )

    arrays: ClassVar = {
        "segment_ids": "as tokens: 2 p + 1 and 2 p + 2 are the completions of pair p, each after "
        "its prompt; 0 is padding",
        "positions": "as tokens, optional: of each completion from 0 on",
    }
    records: ClassVar[Records] = "preference"
    without_weight = staticmethod(without_weight)

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.dropout = not self.options.disable_dropout


class OfCompletions(OfPairs):
    """What objectives of completions' log-probabilities share."""

    class Options(OfPairs.Options):
        beta: Positive = Field(
            0.1, description="How much a log-ratio weighs: the larger, the nearer the reference."
        )

    arrays: ClassVar = {
        "tokens": "[batch, seq + 1]; with targets [batch, seq]; of a model without segments "
        "[batch, 2, seq + 1]",
        "targets": "[batch, seq], optional: what is predicted",
        **OfPairs.arrays,
        "mask": "as tokens: 1 at the tokens of completions",
    }


class AgainstReference(OfCompletions):
    """What objectives with a reference model share."""

    class Options(OfCompletions.Options):
        reference: Literal["precompute", "each_step"] = Field(
            "precompute",
            description="When the reference's log-probabilities are computed: once, before the "
            "run, and stored with it, or in each step.",
        )
        reference_model: FrozenModelSection | None = Field(
            None,
            description="The folder of the reference, by default the model before the run: with "
            "a new adapter the model without it.",
        )

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

    class Options(AgainstReference.Options):
        loss_type: Annotated[list[DpoType], Field(min_length=1), BeforeValidator(_types)] = Field(
            ["sigmoid"],
            description=f"{', '.join(PAIR_LOSSES)} or sft, or a list of these, which are added.",
        )
        loss_weights: list[Number] | None = Field(
            None, description="The weight of each of several types, by default 1."
        )
        label_smoothing: Beta = Field(
            0.0, description="Share of pairs in the wrong order, of robust and exo_pair."
        )
        ld_alpha: Share | None = Field(
            None,
            description="Weight of the tokens beyond the shorter completion's length (LD-DPO).",
        )
        f_divergence_type: Literal[
            "reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"
        ] = Field("reverse_kl", description="The divergence from the reference.")
        f_alpha_divergence_coef: Number = Field(0.5, description="Alpha of alpha_divergence.")
        discopop_tau: Positive = Field(0.05, description="Temperature of discopop.")
        use_weighting: Annotated[bool, BeforeValidator(_no_weighting)] = Field(
            False, description="WPO's weights of pairs: refused."
        )

    def problems(self, settings: Settings) -> Iterator[Problem]:
        o = self.options
        types = ", ".join(o.loss_type)
        about, smoothing = ("objective.loss_type",), "objective.label_smoothing"
        if len(set(o.loss_type)) < len(o.loss_type):
            yield Problem(about[0], types, "Needs each type once; objective.loss_weights has more.")
        if o.loss_weights is not None and len(o.loss_weights) != len(o.loss_type):
            actual = f"{shown(o.loss_weights)} for {types}"
            yield Problem("objective.loss_weights", actual, "Needs a number for each type.", about)
        if o.label_smoothing and not {"robust", "exo_pair"} & set(o.loss_type):
            works = "It acts in the types robust and exo_pair alone: remove it."
            yield Problem(smoothing, f"{o.label_smoothing} with {types}", works, about)
        if "exo_pair" in o.loss_type and not o.label_smoothing:
            works = "Needs more than 0, such as 0.001."
            yield Problem(smoothing, "0 with exo_pair", works, about)
        if "robust" in o.loss_type and o.label_smoothing >= 0.5:
            works = "Needs less than 0.5."
            yield Problem(smoothing, f"{o.label_smoothing} with robust", works, about)
        others = [x for x in o.loss_type if x not in (*OF_DELTA, "sft")]
        yield from _without_effect(o, "discopop_tau", "discopop", o.loss_type)
        divergence = [o.f_divergence_type]
        yield from _without_effect(o, "f_alpha_divergence_coef", "alpha_divergence", divergence)
        if o.f_divergence_type != "reverse_kl" and others:
            actual = f"{shown(o.f_divergence_type)} with {', '.join(others)}"
            works = f"Such types need reverse_kl; others work with {', '.join(OF_DELTA)} and sft."
            yield Problem("objective.f_divergence_type", actual, works, about)

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

    class Options(OfCompletions.Options):
        loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = Field(
            "sigmoid",
            description="The loss of a pair; ipo and simpo have log-probabilities by token.",
        )
        label_smoothing: Beta = Field(
            0.0, description="Share of pairs in the wrong order, of sigmoid and simpo."
        )
        cpo_alpha: NonNegative = Field(
            1.0, description="Weight of the chosen tokens' negative log-likelihood; SimPO has 0."
        )
        simpo_gamma: NonNegative = Field(0.5, description="The margin of simpo.")

    def problems(self, settings: Settings) -> Iterator[Problem]:
        o = self.options
        yield from _without_effect(o, "simpo_gamma", "simpo", [o.loss_type])
        if o.label_smoothing and o.loss_type in ("hinge", "ipo"):
            works = "It acts in the types sigmoid and simpo alone: remove it."
            actual = f"{o.label_smoothing} with {o.loss_type}"
            yield Problem("objective.label_smoothing", actual, works, ("objective.loss_type",))

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
