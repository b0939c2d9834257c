"""Parameters of learning-rate schedules, with DeepSpeed's names and defaults."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxspeed.config.types import (
    Beta,
    Count,
    Flag,
    Int,
    Natural,
    NonNegative,
    Opaque,
    Section,
    Share,
    Text,
    lower,
)

WarmupType = Annotated[Literal["log", "linear"], BeforeValidator(lower)]


class ScheduleParams(Section):
    """Parameters of every schedule."""

    last_batch_iteration: Int = -1


class WarmupLRParams(ScheduleParams):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's `lr`), then constant."""

    warmup_min_lr: NonNegative = 0.0
    warmup_max_lr: NonNegative | None = None
    warmup_num_steps: Count = 1000
    warmup_type: WarmupType = "log"


class WarmupDecayLRParams(ScheduleParams):
    """Warm-up, then linearly to zero at `total_num_steps`."""

    total_num_steps: Count
    warmup_min_lr: NonNegative = 0.0
    warmup_max_lr: NonNegative = 1e-3
    warmup_num_steps: Count = 1000
    warmup_type: WarmupType = "log"


class WarmupCosineLRParams(ScheduleParams):
    """Ratios of the optimizer's `lr`: a warm-up, then a half cosine to `cos_min_ratio`."""

    total_num_steps: Count
    warmup_min_ratio: Share = 0.0
    warmup_num_steps: Count = 1000
    cos_min_ratio: Share = 1e-4
    warmup_type: WarmupType = "log"


class OneCycleParams(ScheduleParams):
    """Up to `cycle_max_lr`, back to `cycle_min_lr`, then decay; the momentum the other way."""

    cycle_min_lr: NonNegative
    cycle_max_lr: NonNegative
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Count = 2000
    cycle_second_step_size: Natural | None = None
    cycle_first_stair_count: Natural = 0
    cycle_second_stair_count: Natural | None = None
    decay_step_size: Natural = 0
    cycle_momentum: Flag = True
    cycle_min_mom: Beta = 0.8
    cycle_max_mom: Beta = 0.9
    decay_mom_rate: NonNegative = 0.0


class LRRangeTestParams(ScheduleParams):
    """Range test: a growing rate, to find the largest one that still trains."""

    lr_range_test_min_lr: NonNegative = 1e-3
    lr_range_test_step_size: Count = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: Flag = False


SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}

# These set the rate itself; WarmupCosineLR scales the optimizer's, and so may WarmupLR.
ABSOLUTE_SCHEDULES = ("WarmupDecayLR", "OneCycle", "LRRangeTest")


class Scheduler(Section):
    """A schedule: DeepSpeed's `type` and `params`."""

    type: Text
    params: Opaque = Field(default_factory=dict)
