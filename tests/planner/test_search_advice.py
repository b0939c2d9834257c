"""Advice where a step does not fit: the change that frees most, and the fastest few that fit."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxspeed.planner.search.advice import Adviser
from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import keys_of
from jaxspeed.planner.search.candidate_estimate import Estimate
from tests.planner.choices import LIMIT, made_up, space_of
from tests.support.covering import examples

WRITTEN = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
FEW = frozenset({"mesh", "stage", "recompute", "offload_optimizer", "micro"})


def adviser(space, estimate, cost):
    def words(choice):
        return keys_of(WRITTEN, space.base, choice, space.samples)

    return Adviser(space, cost, estimate, words)


def within_three(space):
    """Every choice that three single changes reach, the base too."""
    reached, edge = {space.base}, {space.base}
    for _ in range(3):
        edge = set(itertools.chain.from_iterable(map(space.single, edge))) - reached
        reached |= edge
    return reached


@settings(max_examples=examples(6, 15), deadline=None)
@given(st.integers(0, 10**6))
def test_with_exact_formulas_the_advice_is_the_exhaustive_one(seed):
    space = space_of(WRITTEN, 4, layers=4, tensor=(1, 2), changing=FEW)
    estimate, cost = made_up(space, seed)
    base = estimate(space.base)
    assume(base.fits == "does not fit")
    advice = adviser(space, estimate, cost).advise()
    freed = {c: base.device - estimate(c).device for c in space.single(space.base)}
    if advice.single is None:
        assert max(freed.values()) <= 0
    else:
        assert advice.single.frees == max(freed.values())
    fitting = [estimate(c) for c in within_three(space) if estimate(c).fits == "fits"]
    if not fitting:
        assert advice.cheapest is None or advice.cheapest.estimate.fits == "tight"
        return
    assert advice.cheapest is not None and advice.cheapest.estimate.fits == "fits"
    # A change more has to save a hundredth.
    assert advice.cheapest.estimate.seconds <= 1.05 * min(e.seconds for e in fitting)
    apart = advice.cheapest.estimate.seconds - base.seconds
    assert advice.cheapest.slower == pytest.approx(apart)


def made_of(device, seconds):
    """(estimate, cost) of functions of a choice."""

    def estimate(at):
        size = int(device(at))
        fits = "fits" if 1.2 * size <= LIMIT else "tight" if size <= LIMIT else "does not fit"
        return Estimate(size, 0, LIMIT, LIMIT, fits, seconds(at), 1.0, 0.4)

    return estimate, lambda at: AnalyticCost(device(at), 0.0, seconds(at))


def test_a_change_that_is_not_needed_is_left_out():
    """The stage alone is enough here, and recompute costs."""
    space = space_of(WRITTEN, 4, layers=0, tensor=(1,), changing=FEW)
    sizes = {0: 2.0, 1: 1.5, 2: 1.2, 3: 0.8}
    estimate, cost = made_of(
        lambda at: sizes[at.stage] * LIMIT - (at.recompute != '"none"') * 0.1 * LIMIT,
        lambda at: 1 + 0.2 * at.stage + (at.recompute != '"none"'),
    )
    advice = adviser(space, estimate, cost).advise()
    assert advice.single is not None and advice.cheapest is not None
    assert advice.single.keys == advice.cheapest.keys == {"zero_optimization.stage": 3}
    assert advice.lines() == [
        "largest saving: zero_optimization.stage: 3 frees 1.2 GB (800 MB remain)",
        "cheapest change that fits: zero_optimization.stage: 3 (800 MB of 1 GB; step 60% slower)",
    ]


def test_two_changes_are_found_where_one_is_not_enough():
    space = space_of(WRITTEN, 4, layers=0, tensor=(1,), changing=FEW)
    estimate, cost = made_of(
        lambda at: LIMIT * (2 - 0.7 * (at.stage == 3) - 0.6 * at.offload_optimizer),
        lambda at: 1 + 0.2 * (at.stage == 3) + 0.3 * at.offload_optimizer,
    )
    advice = adviser(space, estimate, cost).advise()
    assert advice.cheapest is not None
    assert advice.cheapest.keys == {
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer.device": "cpu",
    }
    assert advice.figures()["cheapest"]["slower"] == pytest.approx(0.5)


def test_where_nothing_helps_that_is_reported():
    space = space_of(WRITTEN, 4, layers=0, tensor=(1,), changing=FEW)
    estimate, cost = made_of(lambda at: 3 * LIMIT, lambda at: 1.0)
    advice = adviser(space, estimate, cost).advise()
    assert advice.figures() == {"single": None, "cheapest": None}
    assert "no single change frees memory" in advice.lines()[0]
    assert "use more or larger devices" in advice.lines()[1]


def test_advice_does_not_exceed_host_memory():
    space = space_of(WRITTEN, 4, layers=0, tensor=(1,), changing=FEW)

    def estimate(at):
        host = 2 * LIMIT if at.offload_optimizer else 0
        device = int(LIMIT * (0.2 if at.offload_optimizer else 0.7 if at.stage == 3 else 2))
        fits = "fits" if device < LIMIT and not host else "does not fit"
        return Estimate(device, host, LIMIT, LIMIT, fits, 1.0, 1.0, 0.4)

    cost = lambda at: AnalyticCost(estimate(at).device, estimate(at).host, 1.0)  # noqa: E731
    advice = adviser(space, estimate, cost).advise()
    assert advice.single is not None and advice.cheapest is not None
    assert advice.single.keys == advice.cheapest.keys == {"zero_optimization.stage": 3}
