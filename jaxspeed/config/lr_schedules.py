"""Parameters of learning-rate schedules, with DeepSpeed's names and defaults; "linear" beside."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from jaxspeed.config.types import (
    Beta,
    Count,
    Flag,
    Int,
    Natural,
    NonNegative,
    Section,
    Share,
    lower,
)
from jaxspeed.config.verdicts import honoured, refused

WarmupType = Annotated[Literal["log", "linear"], BeforeValidator(lower)]


_WARMUP_START = "Learning rate at the start of the warm-up."
_WARMUP_END = "Learning rate at the end of the warm-up."
_DECAY_END = "The step at which the decay ends."


_WARMUP_STEPS = 'Number of warm-up steps, at least 2 but in "linear".'


class ScheduleParams(Section):
    """Parameters of every schedule."""

    last_batch_iteration: Int = refused(
        -1, "The step counter is in the train state and its checkpoints."
    )


class WarmupParams(ScheduleParams):
    """Length and curve of a warm-up."""

    warmup_num_steps: Natural = honoured(1000, _WARMUP_STEPS)
    warmup_type: WarmupType = honoured(
        "log", 'The warm-up\'s curve: "log", DeepSpeed\'s default, or "linear".'
    )


class WarmupLRParams(WarmupParams):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's `lr`), then constant."""

    warmup_min_lr: NonNegative = honoured(0.0, _WARMUP_START)
    warmup_max_lr: NonNegative | None = honoured(None, _WARMUP_END)


class WarmupDecayLRParams(WarmupParams):
    """Warm-up, then linearly to zero at `total_num_steps`."""

    total_num_steps: Count = honoured(..., _DECAY_END)
    warmup_min_lr: NonNegative = honoured(0.0, _WARMUP_START)
    warmup_max_lr: NonNegative = honoured(1e-3, _WARMUP_END)


class WarmupCosineLRParams(WarmupParams):
    """Ratios of the optimizer's `lr`: a warm-up, then a half cosine to `cos_min_ratio`."""

    total_num_steps: Count = honoured(..., _DECAY_END)
    warmup_min_ratio: Share = honoured(
        0.0, "Start of the warm-up, as a share of the optimizer's lr."
    )
    cos_min_ratio: Share = honoured(1e-4, "End of the cosine, as a share of the optimizer's lr.")


class OneCycleParams(ScheduleParams):
    """Up to `cycle_max_lr`, back to `cycle_min_lr`, then decay; the momentum the other way."""

    cycle_min_lr: NonNegative = honoured(..., "The rate at the cycle's ends.")
    cycle_max_lr: NonNegative = honoured(..., "The rate at the cycle's peak.")
    decay_lr_rate: NonNegative = honoured(0.0, "How fast the rate decays after the cycle.")
    cycle_first_step_size: Count = honoured(2000, "Steps up.")
    cycle_second_step_size: Natural | None = honoured(None, "Steps down; by default as many as up.")
    cycle_first_stair_count: Natural = honoured(0, "Stairs on the way up; 0 for none.")
    cycle_second_stair_count: Natural | None = honoured(
        None, "Stairs on the way down; by default as many as up."
    )
    decay_step_size: Natural = honoured(0, "Steps between two decays after the cycle; 0 for none.")
    cycle_momentum: Flag = honoured(True, "Cycles the first beta against the rate.")
    cycle_min_mom: Beta = honoured(0.8, "The first beta at the rate's peak.")
    cycle_max_mom: Beta = honoured(0.9, "The first beta at the cycle's ends.")
    decay_mom_rate: NonNegative = honoured(0.0, "How fast the first beta grows after the cycle.")


class LRRangeTestParams(ScheduleParams):
    """Range test: a growing rate, to find the largest one that still trains."""

    lr_range_test_min_lr: NonNegative = honoured(
        1e-3, "Learning rate at the start of the range test."
    )
    lr_range_test_step_size: Count = honoured(2000, "Steps from one rate to the next.")
    lr_range_test_step_rate: NonNegative = honoured(1.0, "How fast the rate grows.")
    lr_range_test_staircase: Flag = honoured(False, "Grows in stairs.")


class LinearParams(ScheduleParams):
    """Hugging Face's: to the optimizer's `lr`, then linearly to zero at `total_num_steps`."""

    total_num_steps: Count = honoured(..., _DECAY_END)
    warmup_num_steps: Natural = honoured(0, _WARMUP_STEPS)


SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    "linear": LinearParams,
}

# These set the rate itself; WarmupCosineLR scales the optimizer's, and so may WarmupLR.
ABSOLUTE_SCHEDULES = ("WarmupDecayLR", "OneCycle", "LRRangeTest")
