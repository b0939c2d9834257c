"""The walk finds what an exhaustive search finds, with a part of its estimates."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.planner.search.analytic_cost import AnalyticCost
from jaxspeed.planner.search.candidate import changes
from jaxspeed.planner.search.candidate_estimate import Estimate
from jaxspeed.planner.search.walk import NEAR, Limits, SearchLoop, best_of, order_of
from tests.planner.choices import LIMIT, made_up, space_of, submitted
from tests.support.covering import examples

WRITTEN = {"train_batch_size": 64}
# Of which an exhaustive search takes a second.
FEW = frozenset({"mesh", "stage", "recompute", "stage_saves", "micro"})


def walked(space, estimate, costs, **limits):
    memory_excess = lambda cost: max(1.0, 1.2 * cost.device / LIMIT)  # noqa: E731
    walk = SearchLoop(space, costs, memory_excess, submitted(estimate), Limits(**limits))
    walk.run()
    return walk


@settings(max_examples=examples(4, 10), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 8]), st.sampled_from([0.0, 0.1]))
def test_the_best_of_all_choices_is_found_with_few_estimates(seed, devices, noise):
    space = space_of(WRITTEN, devices, layers=4, tensor=(1, 2, 4), changing=FEW)
    estimate, costs = made_up(space, seed, noise)
    walk = walked(space, estimate, costs)
    everything = {choice: estimate(choice) for choice in space.all()}
    best = best_of(everything)
    if best is None:
        assert walk.best is None
        return
    assert walk.best is not None
    assert walk.done[walk.best].fits == estimate(best).fits
    assert walk.done[walk.best].seconds <= (1.01 if noise == 0 else 1.05) * estimate(best).seconds
    assert len(walk.done) < len(everything) / 3


@settings(max_examples=examples(4, 10), deadline=None)
@given(st.integers(0, 10**6))
def test_the_config_as_it_is_is_always_estimated_and_never_beats_the_best(seed):
    space = space_of({**WRITTEN, "mesh": {"tensor": 2}}, 8, changing=FEW)
    estimate, costs = made_up(space, seed, 0.3)
    walk = walked(space, estimate, costs, trials=20)
    assert space.base in walk.done
    assert all(order_of(walk.done[walk.best]) <= order_of(found) for found in walk.done.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_descent_goes_on_from_the_best_so_far_then_from_other_meshes(seed):
    """Else it ends at the same config, after more estimates."""
    space = space_of(WRITTEN, 8, layers=4, changing=FEW)
    estimate, costs = made_up(space, seed, 0.3)
    starts = []

    class Watched(SearchLoop):
        def _near(self, tops, best, slack):
            starts.append(list(tops))
            if slack == NEAR:
                order = [order_of(found) for found in self.done.values()]
                assert [order_of(self.done[top]) for top in tops] == [min(order)]
                assert best is self.done[tops[0]]
            return super()._near(tops, best, slack)

    memory_excess = lambda cost: max(1.0, 1.2 * cost.device / LIMIT)  # noqa: E731
    Watched(space, costs, memory_excess, submitted(estimate)).run()
    first, others = starts[-2:]
    assert len({top.mesh for top in first + others}) == len(others) + 1 > 3


def test_the_best_change_of_each_setting_is_a_neighbour(monkeypatch):
    """However many changes of two settings by formula are better."""
    monkeypatch.setattr("jaxspeed.planner.search.walk.NEIGHBOURS", 1)
    space = space_of(WRITTEN, 8, layers=4, changing=FEW)
    estimate, costs = made_up(space, 0)
    walk = SearchLoop(space, costs, lambda cost: 1.0, submitted(estimate))
    walk.done[space.base] = best = estimate(space.base)
    found = walk._near([space.base], best, slack=100.0)
    for setting in ("mesh", "stage", "recompute", "micro"):
        alone = [c for c in space.single(space.base) if changes(space.base, c) == [setting]]
        assert min(alone, key=lambda choice: costs(choice).seconds) in found


def test_no_more_than_the_limit_are_estimated():
    space = space_of(WRITTEN, 8, changing=FEW)
    estimate, costs = made_up(space, 1)
    assert len(walked(space, estimate, costs, trials=7).done) == 7


def test_it_ends_when_its_time_is_up_with_what_it_has():
    space = space_of(WRITTEN, 8, changing=FEW)
    estimate, costs = made_up(space, 1)

    def slow(choice):
        time.sleep(0.2)
        return estimate(choice)

    with ThreadPoolExecutor(2) as pool:
        walk = SearchLoop(
            space, costs, lambda cost: 1.0, lambda c: pool.submit(slow, c), Limits(1.5, 99, 2)
        )
        began = time.monotonic()
        walk.run()
        assert time.monotonic() - began < 4
    assert 2 <= len(walk.done) < 40 and walk.best is not None


def test_two_are_estimated_at_a_time_and_never_more():
    space = space_of(WRITTEN, 8, changing=FEW)
    estimate, costs = made_up(space, 3)
    working, most = [], []

    def counted(choice):
        working.append(choice)
        most.append(len(working))
        time.sleep(0.005)
        working.remove(choice)
        return estimate(choice)

    with ThreadPoolExecutor(8) as pool:
        submit = lambda choice: pool.submit(counted, choice)  # noqa: E731
        SearchLoop(space, costs, lambda cost: 1.0, submit, Limits(30, 60, 2)).run()
    assert max(most) == 2


def test_a_refused_choice_is_neither_best_nor_climbed_from():
    space = space_of(WRITTEN, 8, changing=FEW)
    estimate, costs = made_up(space, 5)
    no = Estimate(refused="mesh.tensor: heads do not divide")
    walk = walked(space, lambda c: no if c.tensor > 1 else estimate(c), costs)
    assert walk.best is not None and walk.best.tensor == 1


def test_a_tight_choice_loses_to_one_with_headroom():
    space = space_of(WRITTEN, 8, changing=FEW)
    choices = list(space.all())[:2]
    tight = Estimate(99, 0, 100, 100, "tight", 1.0)
    roomy = Estimate(50, 0, 100, 100, "fits", 2.0)
    done = dict(zip(choices, (tight, roomy)))
    assert best_of(done) == choices[1]


@pytest.mark.parametrize("error", [RuntimeError("the process ended")])
def test_an_error_in_an_estimate_ends_the_search(error):
    space = space_of(WRITTEN, 8, changing=FEW)
    _, costs = made_up(space, 1)

    def broken(choice):
        raise error

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="the process ended"):
        SearchLoop(space, costs, lambda s: 1.0, lambda c: pool.submit(broken, c)).run()


def test_of_equally_fast_meshes_one_with_entire_dims_of_the_torus_is_the_best():
    """The best is the first of the fastest, and meshes that split dims come last."""

    def splits(mesh):
        return mesh[2] >= 4

    space = space_of(WRITTEN, 8, tensor=(1, 2), changing=frozenset({"mesh"}), splits=splits)
    in_order = [splits(mesh) for mesh in space.meshes]
    assert splits(space.base.mesh) and {False, True} == set(in_order)
    assert in_order == sorted(in_order)

    def estimate(choice):
        seconds = 2.0 if choice == space.base else 1.0
        return Estimate(1, 0, LIMIT, LIMIT, "fits", seconds, 1 / seconds, 0.5)

    walk = walked(space, estimate, lambda choice: AnalyticCost(1.0, 0.0, 1.0))
    assert any(splits(choice.mesh) and choice != space.base for choice in walk.done)
    assert walk.best and not splits(walk.best.mesh)


def test_the_base_is_estimated_even_if_that_takes_longer_than_the_limit():
    space = space_of(WRITTEN, 8, changing=FEW)
    estimate, costs = made_up(space, 1)
    walk = walked(space, estimate, costs, seconds=0.0)
    assert set(walk.done) == {space.base}
