"""Keys of the objectives that sample completions while they train, without JAX.

Their names, defaults and bounds are those of TRL's GRPOConfig and RLOOConfig of 1.16.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.objective_options import ObjectiveOptions
from jaxspeed.config.problems import Problem
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.config.schema import Settings
from jaxspeed.config.types import (
    Count,
    Flag,
    Natural,
    NonNegative,
    Number,
    Positive,
    Share,
    Text,
    is_list,
)
from jaxspeed.config.verdicts import shown


def _only(default: Any, reason: str) -> BeforeValidator:
    """The check of a key that is refused with another value than its default."""

    def check(value: Any) -> Any:
        if value != default:
            needs = f"{shown(default)}: {reason}"
            raise PydanticCustomError("only", "{needs}", {"needs": needs})
        return value

    return BeforeValidator(check)


def _loss_type(value: Any) -> Any:
    reason = {
        "bnpo": "dapo, which it is on one device: its own normalizer depends on the mesh",
        "vespo": "one of the other types: vespo is not computed here",
        "gspo": 'another type, with importance_sampling_level: "sequence", which GSPO is',
        "gdpo": 'another type, with multi_objective_aggregation: "normalize_then_sum"',
    }.get(value if isinstance(value, str) else "")
    if reason:
        raise PydanticCustomError("loss_type", "{needs}", {"needs": reason})
    return value


def _scale(value: Any) -> Any:
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    return list(value) if is_list(value) else [value]


class SamplingOptions(ObjectiveOptions):
    """How completions are sampled."""

    max_completion_length: Count = Field(
        512, description="The most tokens of a completion, of which the last may be its end."
    )
    temperature: Positive = Field(
        1.0, description="Divides the logits, where tokens are drawn and in the loss."
    )
    top_p: Annotated[Share, Field(gt=0)] = Field(
        1.0, description="Tokens are drawn from the most likely ones of this probability together."
    )
    top_k: Natural = Field(
        0, description="Tokens are drawn from so many most likely ones; 0 for all."
    )
    min_p: Share | None = Field(
        None, description="Tokens of less than this share of the largest probability are not drawn."
    )
    repetition_penalty: Annotated[
        Number, _only(1, "the log-probabilities that train are of the model's own distribution")
    ] = Field(1.0, description="Refused, unless it is 1.")
    stop: Annotated[list[Text], BeforeValidator(_listed)] = Field(
        [], description="Texts at which a completion ends."
    )
    mirror_sampling: Flag = Field(
        True,
        description="Whether log-probabilities are those of the distribution that was drawn from, "
        "with top_p, top_k and min_p; otherwise of the temperature alone, as TRL's are.",
    )
    steps_per_generation: Count | None = Field(
        None,
        description="Micro-batches for which completions are sampled at once, by default those of "
        "a step.",
    )
    num_generations_eval: Count = Field(
        1,
        description="Completions of a prompt in evaluation: the most likely one, and further ones "
        "that are sampled, for pass@k.",
    )
    rollout_block: Count | None = Field(
        None,
        description="Completions that a device samples together, on which bits depend: by default "
        "8 on a CPU, else 64.",
    )
    rollout: Text | None = Field(
        None, description="A function package.module:name that samples instead of the model."
    )

    @property
    def draws_from_some(self) -> bool:
        """Whether the loss is of distributions over some tokens, which thresholds describe."""
        removes = self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
        return removes and self.mirror_sampling and self.rollout is None

    def problems(self, settings: Settings) -> Iterator[Problem]:
        reduction, key = settings.parallel.data_reduction, "parallel.data_reduction"
        if reduction != "xla":
            works = 'Completions are sampled by one program of all devices: write "xla".'
            actual = f"{shown(reduction)} with objective.type {shown(_type_of(settings))}"
            yield Problem(key, actual, works, ("objective.type",))
        train, accumulation = settings.train_batch_size, settings.gradient_accumulation_steps
        yield from rollout_problems(self, train, accumulation)


def _type_of(settings: Settings) -> str:
    assert settings.objective is not None
    return settings.objective.type


def rollout_problems(
    options: SamplingOptions, train: int | None, accumulation: int | None
) -> Iterator[Problem]:
    """Yield what is wrong with the number of completions of a rollout.

    Args:
      train, accumulation: completions and micro-batches of a step, as far as they are known.
    """
    steps, group = options.steps_per_generation, getattr(options, "num_generations", 1)
    if steps is not None and accumulation is None:
        return
    if steps is not None and accumulation is not None and steps % accumulation:
        near = max(steps // accumulation, 1) * accumulation
        works = f"It counts micro-batches, and a step has {accumulation}: needs a multiple of these"
        actual = f"{steps} with gradient_accumulation_steps {accumulation}"
        about = ("gradient_accumulation_steps",)
        key = "objective.steps_per_generation"
        yield Problem(key, actual, f"{works}, such as {near}.", about)
    elif train is not None:
        rows = train * ((steps or 1) // (accumulation or 1) if steps else 1)
        if rows % group:
            below = train // group * group
            either = f"{below} or {below + group}" if below else f"{group}"
            actual = f"{train}, of {rows} completions at once, with num_generations {group}"
            works = (
                "It counts completions, and those of a prompt are sampled together: needs "
                f"{either}, or a num_generations that divides {rows}."
            )
            yield Problem("train_batch_size", actual, works, ("objective.num_generations",))


# Keys that a run may change when it continues: how rewards are called, and evaluation.
CHANGEABLE = (
    *("reward_timeout", "reward_workers", "reward_error"),
    *("num_generations_eval", "pass_reward"),
)


class PolicyOptions(SamplingOptions):
    """What GRPO and RLOO share."""

    rewards: Annotated[list[Text], Field(min_length=1), BeforeValidator(_listed)] = Field(
        description="Functions package.module:name, or folders of reward models."
    )
    reward_weights: list[Number] | None = Field(
        None, description="The weight of each reward, by default 1."
    )
    reward_timeout: Positive = Field(60.0, description="Seconds that a call of a reward may take.")
    reward_batch: Count = Field(
        1, description="Prompts whose completions are in one call of a reward."
    )
    reward_workers: Count | None = Field(
        None, description="Processes in which rewards run, by default one for each CPU, at most 4."
    )
    reward_error: Literal["error", "zero", "drop"] = Field(
        "error",
        description="What a reward that fails or takes too long does: it ends the run, counts as "
        "0, or as none.",
    )
    num_iterations: Count = Field(1, description="Passes over sampled completions.")
    epsilon: NonNegative = Field(0.2, description="How far below 1 a ratio is clipped.")
    epsilon_high: NonNegative | None = Field(
        None, description="How far above 1 a ratio is clipped, by default epsilon."
    )
    beta: NonNegative = Field(0.0, description="Coefficient of the KL to the reference.")
    reference_model: FrozenModelSection | None = Field(
        None,
        description="The folder of the reference, by default the model before the run: with "
        "adapters the model without them.",
    )
    disable_dropout: Flag = Field(
        False, description="The model and adapters have no dropout, as where they sample."
    )
    mask_truncated_completions: Flag = Field(
        False, description="Whether completions without an end are left out of the loss."
    )
    pass_reward: Number = Field(
        1.0, description="The reward from which a completion counts in pass@k."
    )

    def problems(self, settings: Settings) -> Iterator[Problem]:
        yield from super().problems(settings)
        if self.reference_model is not None and not self.beta:
            works = "It acts with objective.beta above 0 alone: set that, or remove it."
            yield Problem("objective.reference_model", "a reference with beta 0", works)
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            actual = f"{shown(self.reward_weights)} for {len(self.rewards)} rewards"
            works = "Needs a number for each reward."
            yield Problem("objective.reward_weights", actual, works, ("objective.rewards",))
        if len(set(self.rewards)) < len(self.rewards):
            works = "Needs each reward once; objective.reward_weights has more."
            yield Problem("objective.rewards", shown(self.rewards), works)


CLIPPED_TYPES = ("dapo", "grpo", "dr_grpo", "luspo")


class GrpoOptions(PolicyOptions):
    num_generations: Annotated[Count, Field(ge=2)] = Field(
        8, description="Completions of a prompt, whose rewards are compared."
    )
    delta: Positive | None = Field(
        None, description="Bounds the ratio of the term that is not clipped."
    )
    loss_type: Annotated[
        Literal["dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo"], BeforeValidator(_loss_type)
    ] = Field("dapo", description="The loss of a token, and what sums are divided by.")
    sapo_temperature_pos: Positive = Field(1.0, description="Of sapo, for advantages above 0.")
    sapo_temperature_neg: Positive = Field(1.05, description="Of sapo, for the others.")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="Whether ratios are of tokens, or means of sequences (GSPO)."
    )
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        BeforeValidator(_scale),
    ] = Field("group", description="Of what the deviation is that divides advantages.")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize", description="How several rewards become an advantage."
    )
    use_bias_correction_kl: Flag = Field(
        True, description="Whether the KL is multiplied by the ratio, so that it is unbiased."
    )
    importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = Field(
        None,
        description="How the ratio of trainer and sampler corrects the loss; by default not: here "
        "they are one program family.",
    )
    clip_max: Positive = Field(3.0, description="The largest such ratio.")
    clip_min: NonNegative | None = Field(None, description="The least such ratio.")
    top_entropy_quantile: Annotated[
        Number, _only(1, "tokens of low entropy are not left out here")
    ] = Field(1.0, description="Refused, unless it is 1.")
    entropy_coef: Annotated[Number, _only(0, "there is no entropy in the loss here")] = Field(
        0.0, description="Refused, unless it is 0."
    )
    off_policy_mask_threshold: Annotated[
        Number | None, _only(None, "sequences are not left out by their KL here")
    ] = Field(None, description="Refused.")

    def problems(self, settings: Settings) -> Iterator[Problem]:
        yield from super().problems(settings)
        kind, about = self.loss_type, ("objective.loss_type",)
        if kind == "cispo" and self.epsilon_high is None:
            works = (
                "Needs a number, such as 5.0: it bounds the ratio itself, not its distance to 1."
            )
            yield Problem("objective.epsilon_high", "nothing with cispo", works, about)
        clips = kind in CLIPPED_TYPES
        normalizes = self.multi_objective_aggregation == "normalize_then_sum"
        acts = {
            "delta": (clips, f"loss_type {', '.join(CLIPPED_TYPES)}"),
            "epsilon": (clips, f"loss_type {', '.join(CLIPPED_TYPES)}"),
            "epsilon_high": (kind != "sapo", f"loss_type {', '.join((*CLIPPED_TYPES, 'cispo'))}"),
            "sapo_temperature_pos": (kind == "sapo", "loss_type sapo"),
            "sapo_temperature_neg": (kind == "sapo", "loss_type sapo"),
            "scale_rewards": (not normalizes, "multi_objective_aggregation sum_then_normalize"),
            "clip_max": (self.importance_sampling_mode, "an importance_sampling_mode"),
            "clip_min": (self.importance_sampling_mode, "an importance_sampling_mode"),
        }
        for key, (has_effect, with_what) in acts.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if not has_effect and value != default:
                works = f"It acts with {with_what} alone: remove it."
                yield Problem(f"objective.{key}", f"{shown(value)} without it", works)
        if (self.clip_min or 0) > self.clip_max:
            works = f"Needs at most {self.clip_max:g}."
            yield Problem("objective.clip_min", f"{self.clip_min:g}, above clip_max", works)


class RlooOptions(PolicyOptions):
    num_generations: Annotated[Count, Field(ge=2)] = Field(
        2, description="Completions of a prompt; the others' mean reward is each one's baseline."
    )
    beta: NonNegative = Field(0.05, description="Coefficient of the KL in the rewards.")
    normalize_advantages: Flag = Field(
        False, description="Whether advantages are whitened over the completions of a rollout."
    )
    reward_clip_range: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = Field(
        None, description="Bounds of rewards."
    )


class DistillOptions(SamplingOptions):
    teacher: FrozenModelSection = Field(
        description="The teacher: a folder, or a section with the folder in `pretrained`."
    )
    beta: Share = Field(
        1.0,
        description="0 for KL(teacher || student), 1 for KL(student || teacher), between for "
        "the generalized Jensen-Shannon divergence.",
    )
    temperature: Positive = Field(1.0, description="Divides the logits of both models.")
    on_policy: Flag = Field(
        False,
        description="Whether the student samples completions of prompts, on which it learns.",
    )
    labels_weight: NonNegative = Field(
        0.0, description="Coefficient of the cross-entropy of the data's own next tokens."
    )

    def problems(self, settings: Settings) -> Iterator[Problem]:
        if self.on_policy:
            yield from super().problems(settings)
            return
        for key, field in SamplingOptions.model_fields.items():
            if key != "temperature" and getattr(self, key) != field.default:
                works = "It acts with objective.on_policy alone: set that, or remove it."
                yield Problem(f"objective.{key}", f"{shown(getattr(self, key))} without it", works)
