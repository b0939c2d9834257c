"""Keys of the objectives of language models, beside `objective.type`, without JAX.

Their names, defaults and bounds are those of TRL's configs of 1.16.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

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
    Section,
    Share,
    is_list,
)
from jaxspeed.config.verdicts import shown

_SORTED = "a type that is a sum over pairs: aot and aot_unpaired sort the pairs of a batch"
# Types of another objective, by the names that TRL's DPO had for them.
_ELSEWHERE = {"simpo": "cpo", "kto": "kto", "kto_pair": "kto", "orpo": "orpo"}
DpoType = Literal[
    "sigmoid", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "robust", "bco_pair",
    "sppo_hard", "apo_zero", "apo_down", "discopop", "sft",
]  # fmt: skip
# Those of a difference of scores, in which the normalizer of another divergence cancels.
OF_DELTA = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "exo_pair", "robust", "discopop")


def _types(value: Any) -> Any:
    types = list(value) if is_list(value) else [value]
    words = [x for x in types if isinstance(x, str)]
    if {"aot", "aot_unpaired"} & {*words}:
        raise PydanticCustomError("sorted", "{needs}", {"needs": _SORTED})
    for word in _ELSEWHERE.keys() & {*words}:
        needs = f"a loss of DPO; {word} is of objective.type {_ELSEWHERE[word]}"
        raise PydanticCustomError("elsewhere", "{needs}", {"needs": needs})
    return types


def _no_weighting(value: Any) -> Any:
    if value is not False:
        needs = "false: WPO's weights are not computed here"
        raise PydanticCustomError("weighting", "{needs}", {"needs": needs})
    return value


def _without_effect(
    options: Any, key: str, of: Sequence[str], actual: Sequence[str]
) -> Iterator[Problem]:
    """Yield the problem of a key that acts in some types, where it is set without these."""
    value, default = getattr(options, key), type(options).model_fields[key].default
    if {*of}.isdisjoint(actual) and value != default:
        works = f"It acts in {' and '.join(of)} alone: remove it."
        yield Problem(f"objective.{key}", f"{value:g} with {', '.join(actual)}", works)


class ObjectiveOptions(Section):
    """Keys of the section `objective` beside `type`."""

    def problems(self, settings: Settings) -> Iterator[Problem]:
        """Yield problems of these values together, and with those of other sections."""
        yield from ()


class PairOptions(ObjectiveOptions):
    disable_dropout: Flag = Field(True, description="The model and adapters have no dropout.")
    pairs_per_row: Count | None = Field(
        None,
        description="The most pairs that are packed into a row, by default one for 64 tokens, "
        "and at least 4.",
    )


class CompletionOptions(PairOptions):
    beta: Positive = Field(
        0.1, description="How much a log-ratio weighs: the larger, the nearer the reference."
    )


class ReferenceOptions(CompletionOptions):
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


class DpoOptions(ReferenceOptions):
    loss_type: Annotated[list[DpoType], Field(min_length=1), BeforeValidator(_types)] = Field(
        ["sigmoid"],
        description=f"{', '.join(get_args(DpoType)[:-1])} or sft, or a list of these, which are "
        "added.",
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
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        Field("reverse_kl", description="The divergence from the reference.")
    )
    f_alpha_divergence_coef: Number = Field(0.5, description="Alpha of alpha_divergence.")
    discopop_tau: Positive = Field(0.05, description="Temperature of discopop.")
    use_weighting: Annotated[bool, BeforeValidator(_no_weighting)] = Field(
        False, description="WPO's weights of pairs: refused."
    )

    def problems(self, settings: Settings) -> Iterator[Problem]:
        types = ", ".join(self.loss_type)
        about, smoothing = ("objective.loss_type",), "objective.label_smoothing"
        if len(set(self.loss_type)) < len(self.loss_type):
            yield Problem(about[0], types, "Needs each type once; objective.loss_weights has more.")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            actual = f"{shown(self.loss_weights)} for {types}"
            yield Problem("objective.loss_weights", actual, "Needs a number for each type.", about)
        of_smoothing = ("robust", "exo_pair")
        yield from _without_effect(self, "label_smoothing", of_smoothing, self.loss_type)
        if "exo_pair" in self.loss_type and not self.label_smoothing:
            works = "Needs more than 0, such as 0.001."
            yield Problem(smoothing, "0 with exo_pair", works, about)
        if "robust" in self.loss_type and self.label_smoothing >= 0.5:
            works = "Needs less than 0.5."
            yield Problem(smoothing, f"{self.label_smoothing} with robust", works, about)
        others = [x for x in self.loss_type if x not in (*OF_DELTA, "sft")]
        yield from _without_effect(self, "discopop_tau", ["discopop"], self.loss_type)
        alpha, divergence = ["alpha_divergence"], [self.f_divergence_type]
        yield from _without_effect(self, "f_alpha_divergence_coef", alpha, divergence)
        if self.f_divergence_type != "reverse_kl" and others:
            actual = f"{shown(self.f_divergence_type)} with {', '.join(others)}"
            works = f"Such types need reverse_kl; others work with {', '.join(OF_DELTA)} and sft."
            yield Problem("objective.f_divergence_type", actual, works, about)


class CpoOptions(CompletionOptions):
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
        yield from _without_effect(self, "simpo_gamma", ["simpo"], [self.loss_type])
        of_smoothing = ("sigmoid", "simpo")
        yield from _without_effect(self, "label_smoothing", of_smoothing, [self.loss_type])


class KtoOptions(ReferenceOptions):
    loss_type: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto", description="apo_zero_unpaired has no KL."
    )
    desirable_weight: NonNegative = Field(1.0, description="Weight of desirable completions.")
    undesirable_weight: NonNegative = Field(1.0, description="Weight of the others.")
    kl_block: Count | None = Field(
        None,
        ge=2,
        description="Rows of the data within which each prompt gets the completion before it, "
        "for the KL; by default train_batch_size.",
    )


class RewardOptions(PairOptions):
    center_rewards_coefficient: NonNegative | None = Field(
        None, description="Weight of the squared sum of a pair's rewards, which centers them."
    )

    def problems(self, settings: Settings) -> Iterator[Problem]:
        model = settings.model
        if model is not None and model.factory is not None:
            works = "A reward model is a family's decoder with a scalar head: name a family."
            shown_type = f"{shown('reward')} with model.factory"
            yield Problem("objective.type", shown_type, works, ("model.factory",))


OPTIONS: dict[str, type[ObjectiveOptions]] = {
    "dpo": DpoOptions,
    "cpo": CpoOptions,
    "orpo": CompletionOptions,
    "kto": KtoOptions,
    "reward": RewardOptions,
}
