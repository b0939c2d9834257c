"""What training reads of a rollout's rewards: advantages, weights of rows, metrics; on the host.

Formulas, names and defaults are those of TRL 1.16. A reward is NaN where a function gave none; a
completion without any has no part in its group, and the advantage 0. Groups are consecutive rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspeed.config.rollout_options import GrpoOptions, PolicyOptions, RlooOptions

EPSILON = 1e-4  # beside the deviations that divide
ZERO_DEVIATION = 1e-8


class Advantages(NamedTuple):
    """Of the completions of a rollout."""

    values: np.ndarray  # fp32 [rows]
    totals: np.ndarray  # [rows], the weighted sums of rewards; NaN where there is none
    metrics: dict[str, float]


def advantages(
    values: np.ndarray,
    options: GrpoOptions | RlooOptions,
    kl: np.ndarray | None = None,
    names: Sequence[str] = (),
) -> Advantages:
    """Compute the advantages of a rollout's completions.

    Args:
      values: [rows, rewards].
      kl: [rows], of RLOO with a beta: log-ratios of completions to the reference.
      names: of the rewards, for their metrics.
    """
    values = np.asarray(values, np.float64)
    size = options.num_generations
    totals = _total(values, options)
    if isinstance(options, RlooOptions):
        result, deviations = _leave_one_out(totals, size, options, kl)
    else:
        normalized = options.multi_objective_aggregation == "normalize_then_sum"
        compute = _normalize_then_sum if normalized else _sum_then_normalize
        result, deviations = compute(values, totals, size, options)
    by_name = {
        f"rewards/{name}/{key}": of(x).item()
        for name, x in zip(names, values.T)
        for key, of in (("mean", _mean), ("std", _deviation))
    }
    metrics = {
        **by_name,
        "reward": _mean(totals).item(),
        "reward_std": _deviation(totals).item(),
        "frac_reward_zero_std": float(np.mean(deviations <= ZERO_DEVIATION)),
    }
    return Advantages(np.nan_to_num(result, nan=0.0).astype(np.float32), totals, metrics)


def _sum_then_normalize(
    values: np.ndarray, totals: np.ndarray, size: int, options: GrpoOptions
) -> tuple[np.ndarray, np.ndarray]:
    groups = totals.reshape(-1, size)
    centered = groups - _mean(groups, 1)
    deviations = _deviation(groups, None if options.scale_rewards == "batch" else 1)
    if options.scale_rewards != "none":
        centered = centered / (deviations + EPSILON)
    return centered.reshape(-1), deviations


def _normalize_then_sum(
    values: np.ndarray, totals: np.ndarray, size: int, options: GrpoOptions
) -> tuple[np.ndarray, np.ndarray]:
    groups = values.reshape(-1, size, values.shape[1])
    normalized = (groups - _mean(groups, 1)) / (_deviation(groups, 1) + EPSILON)
    sums = np.where(np.isnan(totals), np.nan, _weighted(normalized.reshape(values.shape), options))
    deviation = _deviation(sums)
    return (sums - _mean(sums)) / (deviation + EPSILON), deviation


def _leave_one_out(
    totals: np.ndarray, size: int, options: RlooOptions, kl: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    if options.reward_clip_range is not None:
        low, high = options.reward_clip_range
        totals = np.clip(totals, low, high)
    if options.beta:
        assert kl is not None
        totals = totals - options.beta * kl
    groups = totals.reshape(-1, size)
    others = np.sum(~np.isnan(groups), 1, keepdims=True) - 1
    with np.errstate(invalid="ignore"):  # 0 / 0, of a group with a single reward
        baselines = (np.nansum(groups, 1, keepdims=True) - groups) / others
    result = (groups - baselines).reshape(-1)
    if options.normalize_advantages:
        result = (result - _mean(result)) / (_deviation(result) + EPSILON)
    return result, _deviation(groups, 1)


def _total(values: np.ndarray, options: PolicyOptions) -> np.ndarray:
    has_none = np.all(np.isnan(values), axis=1)
    return np.where(has_none, np.nan, _weighted(values, options))


def _weighted(values: np.ndarray, options: PolicyOptions) -> np.ndarray:
    weights = options.reward_weights or [1.0] * values.shape[1]
    return np.nansum(values * np.asarray(weights), axis=1)


def _mean(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of the numbers that are not NaN, with the dims of x; NaN of none."""
    count = np.sum(~np.isnan(x), axis, keepdims=True)
    total = np.nansum(x, axis, keepdims=True)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _deviation(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Their unbiased standard deviation, with the dims of x; NaN of fewer than two."""
    count = np.sum(~np.isnan(x), axis, keepdims=True)
    squares = np.nansum((x - _mean(x, axis)) ** 2, axis, keepdims=True)
    variance = np.divide(squares, count - 1, out=np.full_like(squares, np.nan), where=count > 1)
    return np.sqrt(variance)


def row_weights(lengths: np.ndarray, options: PolicyOptions) -> np.ndarray:
    """What the loss of a step is divided by, as a weight of each row: fp32 [rows].

    Args:
      lengths: numbers of tokens that train, of all rows of a rollout.
    """
    weight = 1.0
    if isinstance(options, GrpoOptions):
        if options.loss_type in ("dapo", "cispo"):
            weight = max(float(np.sum(lengths)), 1.0) / len(lengths)
        elif options.loss_type == "dr_grpo":
            weight = float(options.max_completion_length)
    return np.full(len(lengths), weight, np.float32)


def completion_metrics(lengths: np.ndarray, ended: np.ndarray) -> dict[str, float]:
    """Metrics of completions of so many tokens, and whether they have an end: bool [rows]."""
    lengths, ended = np.asarray(lengths, np.float64), np.asarray(ended, bool)
    terminated = lengths[ended] if ended.any() else np.zeros(1)
    metrics = {"completions/clipped_ratio": float(np.mean(~ended))}
    for name, x in (("length", lengths), ("terminated_length", terminated)):
        metrics |= {
            f"completions/mean_{name}": float(x.mean()),
            f"completions/min_{name}": float(x.min()),
            f"completions/max_{name}": float(x.max()),
        }
    return metrics
