"""Advantages, weights of rows and metrics of rewards equal loops over groups, on skewed rewards."""

import statistics
from typing import Any

import numpy as np
import pytest

from jaxspeed.config.rollout_options import GrpoOptions, RlooOptions
from jaxspeed.rewards.advantages import advantages, completion_metrics, row_weights

pytestmark = pytest.mark.fast
SIZE, GROUPS, NAMES = 4, 6, ["exact", "length"]


def recorded() -> np.ndarray:
    """Two rewards of each row: some without, rows and a group without any, one alone, all equal."""
    rng = np.random.default_rng(0)
    values = rng.exponential(2, (GROUPS, SIZE, 2)) - 1
    values[0, 1] = np.nan  # a row
    values[1, :, 0] = np.nan  # one reward of a group
    values[2] = np.nan  # a group
    values[3, 1:] = np.nan  # a single row is left
    values[4] = [0.1, 0.7]  # all equal
    values[5, :2, 1] = np.nan
    return values.reshape(-1, 2)


def options_of(kind: Any = GrpoOptions, **keys: Any) -> Any:
    rewards = {"rewards": ["a:b", "c:d"], "num_generations": SIZE}
    return kind.model_validate({**rewards, **keys})


def total(row: np.ndarray, weights: list[float]) -> float:
    known = [x * w for x, w in zip(row, weights) if not np.isnan(x)]
    return sum(known) if known else float("nan")


def numbers(values: Any) -> list[float]:
    return [float(x) for x in values if not np.isnan(x)]


def deviation(values: Any) -> float:
    known = numbers(values)
    return statistics.stdev(known) if len(known) > 1 else float("nan")


def mean(values: Any) -> float:
    known = numbers(values)
    return sum(known) / len(known) if known else float("nan")


def of_groups(values: Any) -> list[Any]:
    return [values[i : i + SIZE] for i in range(0, len(values), SIZE)]


def plain_grpo(
    values: np.ndarray, weights: list[float], scale: str, normalize: bool
) -> list[float]:
    totals = [total(row, weights) for row in values]
    if not normalize:
        result = []
        for group in of_groups(totals):
            by = {"group": deviation(group), "batch": deviation(totals)}.get(scale)
            centered = [x - mean(group) for x in group]
            result += centered if by is None else [x / (by + 1e-4) for x in centered]
    else:
        columns = []
        for column, weight in zip(values.T, weights):
            columns.append([])
            for group in of_groups(column):
                by = deviation(group) + 1e-4
                columns[-1] += [weight * (x - mean(group)) / by for x in group]
        sums = [
            float("nan") if np.isnan(x) else sum(numbers(row))
            for x, row in zip(totals, zip(*columns))
        ]
        result = [(x - mean(sums)) / (deviation(sums) + 1e-4) for x in sums]
    return [0.0 if np.isnan(x) else x for x in result]


@pytest.mark.parametrize("weights", [None, [1.0, 1.0], [0.3, -2.0]])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_compares_the_completions_of_a_prompt(scale, weights):
    values = recorded()
    mine = advantages(values, options_of(scale_rewards=scale, reward_weights=weights))
    expected = plain_grpo(values, weights or [1, 1], scale, False)
    assert mine.values.dtype == np.float32
    np.testing.assert_allclose(mine.values, expected, rtol=1e-6, atol=1e-6)
    assert not mine.values[8:12].any() and np.isnan(mine.totals[8:12]).all()


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 2.0]])
def test_each_reward_is_normalized_before_the_sum(weights):
    """GDPO."""
    values, keys = recorded(), {"multi_objective_aggregation": "normalize_then_sum"}
    mine = advantages(values, options_of(reward_weights=weights, **keys))
    expected = plain_grpo(values, weights, "group", True)
    np.testing.assert_allclose(mine.values, expected, rtol=1e-6, atol=1e-6)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("bounds", [None, [-0.2, 1.5]])
def test_rloo_leaves_one_out(bounds, whiten):
    values, weights = recorded(), [0.5, 2.0]
    kl = np.random.default_rng(1).normal(size=len(values))
    options = options_of(
        RlooOptions, reward_weights=weights, beta=0.2, reward_clip_range=bounds,
        normalize_advantages=whiten,
    )  # fmt: skip
    totals = [total(row, weights) for row in values]
    if bounds:
        totals = [min(max(x, bounds[0]), bounds[1]) if not np.isnan(x) else x for x in totals]
    totals = [x - 0.2 * k for x, k in zip(totals, kl)]
    expected = []
    for group in of_groups(totals):
        for i, x in enumerate(group):
            expected.append(x - mean([*group[:i], *group[i + 1 :]]))
    if whiten:
        expected = [(x - mean(expected)) / (deviation(expected) + 1e-4) for x in expected]
    mine = advantages(values, options, kl)
    np.testing.assert_allclose(mine.values, np.nan_to_num(expected), rtol=1e-6, atol=1e-6)


def test_metrics_of_rewards():
    values, options = recorded(), options_of(reward_weights=[1.0, 0.5])
    totals = [total(row, [1.0, 0.5]) for row in values]
    expected = {
        "rewards/exact/mean": mean(values[:, 0]),
        "rewards/exact/std": deviation(values[:, 0]),
        "rewards/length/mean": mean(values[:, 1]),
        "rewards/length/std": deviation(values[:, 1]),
        "reward": mean(totals),
        "reward_std": deviation(totals),
        "frac_reward_zero_std": 1 / GROUPS,  # a group of one reward has no deviation
    }
    assert advantages(values, options, names=NAMES).metrics == pytest.approx(expected, rel=1e-9)


def test_metrics_of_no_reward_at_all():
    metrics = advantages(np.full((SIZE, 1), np.nan), options_of(), names=["exact"]).metrics
    assert np.isnan([metrics["reward"], metrics["rewards/exact/mean"]]).all()
    assert metrics["frac_reward_zero_std"] == 0


LENGTHS = np.array([3, 0, 7, 1])


@pytest.mark.parametrize(
    ("kind", "weight"),
    [("dapo", 11 / 4), ("cispo", 11 / 4), ("grpo", 1), ("sapo", 1), ("luspo", 1), ("dr_grpo", 512)],
)
def test_what_the_loss_of_a_step_is_divided_by(kind, weight):
    np.testing.assert_array_equal(row_weights(LENGTHS, options_of(loss_type=kind)), [weight] * 4)


def test_weights_of_rloo_and_of_rollouts_without_tokens():
    np.testing.assert_array_equal(row_weights(LENGTHS, options_of(RlooOptions)), [1] * 4)
    assert row_weights(np.zeros(4), options_of()).sum() == 1


@pytest.mark.parametrize("ended", [[True, False, True, True], [False] * 4])
def test_metrics_of_completions(ended):
    lengths = [5, 8, 2, 5]
    of_ended = [n for n, end in zip(lengths, ended) if end] or [0]
    assert completion_metrics(np.array(lengths), np.array(ended)) == {
        "completions/mean_length": 5,
        "completions/min_length": 2,
        "completions/max_length": 8,
        "completions/clipped_ratio": 1 - sum(ended) / 4,
        "completions/mean_terminated_length": sum(of_ended) / len(of_ended),
        "completions/min_terminated_length": min(of_ended),
        "completions/max_terminated_length": max(of_ended),
    }
