"""Learning-rate schedules by DeepSpeed's names, parameters and formulas.

As in deepspeed/runtime/lr_schedules.py (0.19.6). A schedule is a function of the **step: the number
of optimizer updates that were completed before this one**, 0 for the first; skipped steps do not
count. DeepSpeed's scheduler is stepped *after* each update, so its `last_batch_iteration`, k below,
is step - 1: the first update uses what its constructor set (k = -1), the second k = 0, and so on.
`linear` is Hugging Face's, which has no such lag.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspeed.errors import ConfigError
from jaxspeed.optim.transforms import Step

WarmupType = Literal["log", "linear"]


def _constant(step: Step, base_lr: float) -> jax.Array:
    return jnp.asarray(base_lr, dtype=float)


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate and betas as functions of the step; constant without a scheduler."""

    lr: Callable[[Step, float], jax.Array] = _constant  # (step, the optimizer's lr) -> lr
    betas: Callable[[Step], tuple[jax.Array, float]] | None = None  # None: the optimizer's


def build_schedule(type: str | None, params: Mapping[str, Any]) -> LRSchedule:
    """The schedule of a config's `scheduler`; `type` None is no scheduler.

    Args:
      type: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest or linear.
      params: its parameters by DeepSpeed's names, validated by the config.

    Raises:
      ConfigError: an unknown type.
    """
    if type is None:
        return LRSchedule()
    if type not in _SCHEDULES:
        raise ConfigError(f"scheduler.type: unknown {type!r}; known: {', '.join(_SCHEDULES)}")
    # The config accepts only last_batch_iteration -1, the start.
    arguments = {name: value for name, value in params.items() if name != "last_batch_iteration"}
    return _SCHEDULES[type](**arguments)


def warmup_lr(
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> LRSchedule:
    """WarmupLR: from min to max over W steps, then max: `min + (max - min) gamma(k)`.

    Here

        gamma(k) = log(k + 1) / log(W)   or   k / W        for k < W, then 1

    and `min` for the first update. `warmup_max_lr` is by default the optimizer's lr.
    """
    gamma = _warmup(warmup_num_steps, warmup_type)

    def lr(step: Step, base_lr: float) -> jax.Array:
        highest = base_lr if warmup_max_lr is None else warmup_max_lr
        return warmup_min_lr + (highest - warmup_min_lr) * gamma(step, jnp.ones_like)

    return LRSchedule(lr)


def warmup_decay_lr(
    *,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> LRSchedule:
    """WarmupDecayLR: as `warmup_lr`, then linearly to *zero*.

    For k >= W of T steps in all, gamma(k) = max(0, (T - k) / max(1, T - W)).
    """
    gamma = _warmup(warmup_num_steps, warmup_type)
    decay_steps = max(1, total_num_steps - max(2, warmup_num_steps))

    def decay(k: jax.Array) -> jax.Array:
        return jnp.maximum(0, (total_num_steps - k) / decay_steps)

    def lr(step: Step, base_lr: float) -> jax.Array:
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma(step, decay)

    return LRSchedule(lr)


def warmup_cosine_lr(
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: WarmupType = "log",
) -> LRSchedule:
    """WarmupCosineLR: the optimizer's lr times a ratio.

    The ratio is 0 for the first update, then for k < W

        ratio(k) = min_ratio + (1 - min_ratio) gamma(k)

    with gamma as in `warmup_lr`, and for k >= W of T steps in all

        ratio(k) = cos_min + (1 - cos_min) (1 + cos(pi x)) / 2,  x = min(1, (k-W+1) / max(1, T-W))
    """
    gamma = _warmup(warmup_num_steps, warmup_type)
    warmup_num_steps = max(2, warmup_num_steps)
    decay_steps = max(1, total_num_steps - warmup_num_steps)

    def lr(step: Step, base_lr: float) -> jax.Array:
        k = _float(step) - 1
        rise = warmup_min_ratio + (1 - warmup_min_ratio) * gamma(step, jnp.ones_like)
        left = jnp.clip(decay_steps - (k - warmup_num_steps + 1), 0, decay_steps) / decay_steps
        # (1 + cos(pi x)) / 2 = sin^2(pi (1 - x) / 2), which in float32 keeps its digits near x = 1.
        fall = cos_min_ratio + (1 - cos_min_ratio) * jnp.sin(left * (math.pi / 2)) ** 2
        ratio = jnp.where(k < warmup_num_steps, rise, jnp.maximum(0, fall))
        return base_lr * jnp.where(k < 0, 0, ratio)

    return LRSchedule(lr)


def _warmup(
    warmup_num_steps: int, warmup_type: WarmupType
) -> Callable[[Step, Callable[[jax.Array], jax.Array]], jax.Array]:
    """gamma(step, after): 0 for the first update, the warm-up for k < W, then `after(k)`."""
    warmup_num_steps = max(2, warmup_num_steps)

    def gamma(step: Step, after: Callable[[jax.Array], jax.Array]) -> jax.Array:
        k = _float(step) - 1
        if warmup_type.lower() == "log":
            rise = jnp.log(jnp.maximum(1, k + 1)) / math.log(warmup_num_steps)
        else:
            rise = jnp.maximum(0, k) / warmup_num_steps
        return jnp.where(k < warmup_num_steps, rise, after(k))

    return gamma


def lr_range_test(
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> LRSchedule:
    """LRRangeTest: `min_lr (1 + rate (k + 1) / step_size)`, rounded down for a staircase."""

    def lr(step: Step, base_lr: float) -> jax.Array:
        if lr_range_test_staircase:
            interval = _float(jnp.asarray(step) // int(lr_range_test_step_size))
        else:
            interval = _float(step) / lr_range_test_step_size
        return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)

    return LRSchedule(lr)


def one_cycle(
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> LRSchedule:
    """OneCycle: up for F steps, down for S, then a decay; momentum inversely (arXiv:1803.09820).

    With s the height in the cycle, 0 to 1 and back to 0 (in stairs if a count is set), and for
    step > F + S with d = (step - F - S) / decay_step_size, or 0 if decay_step_size is 0:

        lr = min_lr + (max_lr - min_lr) s        then   min_lr / (1 + decay_lr_rate d)
        b1 = max_mom - (max_mom - min_mom) s     then   max_mom (1 + decay_mom_rate d)

    As DeepSpeed's code, this uses `cycle_min_mom` for the first update, and with `cycle_momentum`
    sets b2 to 0.99, whatever the optimizer's betas; optimizers without betas keep their momentum.
    """
    first = int(cycle_first_step_size)  # JSON may write 2e3
    second = first if cycle_second_step_size is None else int(cycle_second_step_size)
    first_stairs = cycle_first_stair_count
    second_stairs = first_stairs if cycle_second_stair_count is None else cycle_second_stair_count
    total = first + second

    def height(step: jax.Array) -> jax.Array:
        position = step % total
        rise = _stairs(position, first, first_stairs)
        fall = _stairs(total - position, max(1, second), second_stairs)
        return jnp.where(position <= first, rise, fall)

    def decay(step: jax.Array, rate: float) -> jax.Array:
        if decay_step_size == 0:
            return jnp.ones_like(_float(step))
        return 1 + rate * _float(step - total) / decay_step_size

    def lr(step: Step, base_lr: float) -> jax.Array:
        step = jnp.asarray(step)
        cycle = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height(step)
        return jnp.where(step <= total, cycle, cycle_min_lr / decay(step, decay_lr_rate))

    def betas(step: Step) -> tuple[jax.Array, float]:
        step = jnp.asarray(step)
        cycle = cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height(step)
        b1 = jnp.where(step <= total, cycle, cycle_max_mom * decay(step, decay_mom_rate))
        return jnp.where(step == 0, cycle_min_mom, b1), 0.99

    return LRSchedule(lr, betas if cycle_momentum else None)


def _stairs(position: jax.Array, size: int, count: int) -> jax.Array:
    """position / size, or rounded down to one of `count` stairs (in integers, to be exact)."""
    if count > 0:
        return _float(position * int(count) // size) / count
    return _float(position) / size


def linear(*, total_num_steps: int, warmup_num_steps: int = 0) -> LRSchedule:
    """Hugging Face's linear schedule: the optimizer's lr times a ratio.

    Of T steps in all, with n the step, 0 for the first update (transformers, optimization.py)

        ratio(n) = n / max(1, W)   for n < W, then   max(0, (T - n) / max(1, T - W))
    """
    decay_steps = max(1, total_num_steps - warmup_num_steps)

    def lr(step: Step, base_lr: float) -> jax.Array:
        n = _float(step)
        fall = jnp.maximum(0, (total_num_steps - n) / decay_steps)
        return base_lr * jnp.where(n < warmup_num_steps, n / max(1, warmup_num_steps), fall)

    return LRSchedule(lr)


def _float(step: Step) -> jax.Array:
    """The step as float32, or float64 where that is enabled."""
    return jnp.asarray(step).astype(float)


_SCHEDULES: dict[str, Callable[..., LRSchedule]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle,
    "LRRangeTest": lr_range_test,
    "linear": linear,
}
