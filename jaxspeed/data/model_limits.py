"""Limits of a model for its data: kind of samples, sequence length, vocabulary size."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspeed.config import Config
from jaxspeed.config.objective_keys import OBJECTIVES, OF_FAMILIES, objective_class
from jaxspeed.config.run_sections import Data
from jaxspeed.errors import DataError
from jaxspeed.objectives import Objective
from jaxspeed.objectives.model_logprobs import THRESHOLDS
from jaxspeed.objectives.policy_gradient import OLD, REFERENCE
from jaxspeed.user_models.config_model import family_sizes, image_processor
from jaxspeed.vision import ImageProcessor

Kind = Literal["tokens", "images"]
_ARRAYS: dict[Kind, set[str]] = {
    "tokens": {"tokens", "targets", "segment_ids", "positions", "mask"},
    "images": {"images", "labels"},
}


@dataclass(frozen=True)
class PairForm:
    """What an objective reads of records of preferences.

    Attributes:
      records: pairs of a chosen and a rejected completion; or completions with a label, each with
        the mismatched completion of another record.
      pairs_per_row: at most so many are packed in a row (`objectives.pairs.most_pairs`).
      kl_block: of completions with a label: the records among which completions are mismatched.
      reads_ends: sequences are read to their end, as for a score: longer ones are left out, and the
        last token of each is an input too.
      margins: whether batches have the margins of pairs.
      segments: whether pairs are packed; otherwise a sample is a pair [2, seq_len + 1].
    """

    records: Literal["preference", "unpaired"]
    pairs_per_row: int | None = None
    kl_block: int | None = None
    reads_ends: bool = False
    margins: bool = False
    segments: bool = True


@dataclass(frozen=True)
class PromptForm:
    """What an objective reads of prompts, whose completions are sampled.

    Attributes:
      arrays: the names of a step's arrays; see `data.prompts.blank_rows`.
      max_completion_length: tokens of a completion at most.
      num_generations: completions of a prompt, each of which is a row.
      num_iterations: steps in which a completion is trained on.
    """

    arrays: tuple[str, ...]
    max_completion_length: int
    num_generations: int = 1
    num_iterations: int = 1


RecordForm = PairForm | PromptForm


def refuse_idle_keys(data: Data, what: str, reasons: Mapping[str, str]) -> None:
    """Raise DataError for a key of the section that has no effect on records of this kind."""
    for key, why in reasons.items():
        if getattr(data, key) != Data.model_fields[key].default:
            raise DataError(f"data.{key}: has no effect on {what}: {why}; leave it out")


@dataclass(frozen=True)
class ModelLimits:
    """Shapes and ranges that a model can read; None is unknown, and no limit.

    `targets` is whether samples of tokens are inputs and targets [seq], which an axis can shard
    evenly and a loss can mask, instead of tokens [seq + 1]. `pairs` is of an objective that reads
    preferences, `prompts` of one that reads prompts.
    """

    sample: Kind | None = None
    seq_len: int | None = None  # number of positions
    vocab_size: int | None = None
    image_shape: tuple[int, int, int] | None = None  # height, width, channels
    classes: int | None = None
    targets: bool = False
    pairs: PairForm | None = None
    prompts: PromptForm | None = None
    images: ImageProcessor | None = None  # of a model that reads images beside tokens

    @property
    def form(self) -> RecordForm | None:
        """What is read of records; None: documents."""
        return self.pairs or self.prompts

    def with_arrays(self, names: Collection[str]) -> "ModelLimits":
        """The limits for batches of these arrays.

        Samples with arrays that those of the model's kind lack are read as the source has them.
        """
        alike = self.sample is not None and names and set(names) <= _ARRAYS[self.sample]
        return self if alike else replace(self, sample=None)


def limits_of(sizes: Any, targets: bool = False) -> ModelLimits:
    """Read the limits from a family's Config by field names; of None, none."""

    def size(name: str) -> int | None:
        return getattr(sizes, name, None)

    image = size("image_size")
    if image is not None:
        return ModelLimits(
            sample="images",
            image_shape=(image, image, size("num_channels") or 3),
            classes=size("num_classes"),
        )
    if size("vocab_size") is not None:
        limits = size("max_position_embeddings"), size("vocab_size")
        corrupts = size("corrupts_inputs")  # None: a decoder
        if corrupts is False:  # samples have labels
            return ModelLimits(None, *limits)
        return ModelLimits("tokens", *limits, targets=targets or bool(corrupts))
    return ModelLimits()


def limits_of_run(
    config: Config, model: Any = None, objective: Objective | None = None
) -> ModelLimits:
    """What the model of a config, or one beside it, can read, and its objective reads."""
    sizes, section = None if model is not None else family_sizes(config), config.objective
    limits = limits_of(sizes, targets=config.mesh.seq != 1)
    limits = replace(limits, images=None if sizes is None else image_processor(config))
    if objective is None and section is not None:
        cls = objective_class(section.type)
        if section.type not in OF_FAMILIES:
            objective = cls(cls.Options.model_validate(section.own_keys))
    if objective is None:
        return limits
    if objective.records == "documents":
        is_own = section is not None and section.type not in OBJECTIVES
        return limits.with_arrays(objective.data_arrays) if is_own else limits
    if objective.records == "prompts":
        return replace(limits, prompts=_prompt_form(config, objective, limits.seq_len))
    keys = {name: getattr(objective.options, name, None) for name in ("pairs_per_row", "kl_block")}
    pairs = PairForm(
        objective.records,
        **keys,
        reads_ends=objective.drops_long,
        margins="margins" in objective.arrays,
        segments=sizes is not None,
    )
    return replace(limits, pairs=pairs)


def _prompt_form(config: Config, objective: Objective, positions: int | None) -> PromptForm:
    """The form of prompts, with the arrays that sampled completions have for the objective.

    Raises:
      DataError: no prompt fits beside the longest completion.
    """
    options, most = objective.options, objective.options.max_completion_length
    context = min(filter(None, (config.data.seq_len, positions)), default=most + 1)
    if most >= context:
        raise DataError(
            f"objective.max_completion_length is {most:,}, and prompt and completion together have "
            f"at most {context:,} tokens (data.seq_len, or the model's positions), so that no "
            f"prompt fits; less than {context:,} would do"
        )
    counts = {name: getattr(options, name, 1) for name in ("num_generations", "num_iterations")}
    without = {"segment_ids", "positions", "mask", REFERENCE}  # a row is one completion
    if not options.draws_from_some:
        without.add(THRESHOLDS)
    steps = options.steps_per_generation
    if counts["num_iterations"] == 1 and (steps is None or steps == _accumulation(config)):
        without.add(OLD)  # the parameters that sampled are those that train
    read = objective.data_arrays - without
    return PromptForm(tuple(name for name in objective.arrays if name in read), most, **counts)


def _accumulation(config: Config) -> int | None:
    """Micro-batches of a step; None if that depends on the devices."""
    ranks = config.mesh.ranks
    if ranks is None:
        return config.gradient_accumulation_steps
    return config.batch(ranks).accumulation
