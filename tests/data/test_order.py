"""Which sample comes when."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.data.samples import ArrayRows
from jaxspeed.data.split import Split
from jaxspeed.objectives import without_weight

BATCH = 8


def numbered(n, first=0):
    """Samples that hold their own number."""
    return ArrayRows({"x": np.arange(first, first + n, dtype=np.int32)})


def split(n=37, seed=0, shuffle=True):
    return Split([numbered(n)], seed=seed, shuffle=shuffle)


def steps(s, first, last, batch=BATCH):
    ids = [s.sample_ids(t, batch) for t in range(first, last)]
    return np.concatenate([np.zeros(0, np.int64), *ids])


def test_each_epoch_holds_each_sample_once_and_in_an_order_of_its_own():
    ids = steps(split(37), 0, 37)
    epochs = ids.reshape(-1, 37)[:8]
    assert len(epochs) == 8
    for epoch in epochs:
        assert sorted(epoch) == list(range(37))
    assert len({tuple(epoch) for epoch in epochs}) == 8


@pytest.mark.parametrize("padded", [False, True])
def test_the_shapes_of_a_batch_take_no_sample(padded):
    """Each process asks for them: of a global batch it reads its rows alone."""
    s = split()
    read = s._chain.read
    ids = []
    s._chain.read = lambda of, *where: (ids.extend(of), read(of, *where))[1]
    batch = split().padded(0, BATCH) if padded else split().batch(0, BATCH)
    assert {
        k: (x.shape, x.dtype)
        for k, x in s.shapes(BATCH, without_weight if padded else None).items()
    } == {k: (x.shape, x.dtype) for k, x in batch.items()}
    assert not ids


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_order_is_the_same_for_any_number_of_processes(processes):
    one = split()
    for step in (0, 3, 11, 1000):
        whole = one.batch(step, BATCH)["x"]
        each = BATCH // processes
        parts = [
            # Each process opens the corpus for itself.
            split().batch(step, BATCH, rows=slice(p * each, (p + 1) * each))["x"]
            for p in range(processes)
        ]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert whole.tolist() == one.sample_ids(step, BATCH).tolist()


# Grain draws an order of few samples out of one of 65536: tiny corpora are slow, and are few here.
@given(
    n=st.sampled_from([1, 7, 150, 301, 700]),
    batch=st.integers(1, 24),
    seed=st.integers(0, 2**63 - 1),
    stopped=st.integers(0, 12),
)
@settings(max_examples=12)
def test_a_restart_loses_and_repeats_nothing(n, batch, seed, stopped):
    last = 12 if n > 7 else 2
    stopped = min(stopped, last)
    unbroken = steps(split(n, seed), 0, last, batch)
    before = steps(split(n, seed), 0, stopped, batch)
    after = steps(split(n, seed), stopped, last, batch)
    assert np.concatenate([before, after]).tolist() == unbroken.tolist()
    whole_epochs = len(unbroken) // n
    counts = np.bincount(unbroken, minlength=n)
    assert counts.min() >= whole_epochs and counts.max() <= whole_epochs + 1


def test_a_batch_across_the_end_of_an_epoch_is_full():
    ids = split(10).sample_ids(1, 8)
    assert len(ids) == 8 and set(split(10).sample_ids(0, 8)) | set(ids[:2]) == set(range(10))


@given(step=st.integers(0, 10**9), rows=st.lists(st.integers(0, 7), min_size=1, unique=True))
def test_any_rows_of_any_step_are_those_of_the_global_batch(step, rows):
    chosen = np.array(sorted(rows))
    s = split(53)
    assert s.batch(step, 8, rows=chosen)["x"].tolist() == s.sample_ids(step, 8)[chosen].tolist()


def test_near_seeds_give_orders_that_have_nothing_in_common():
    epochs = {
        (seed, e): tuple(steps(split(64, seed), 0, 32).reshape(-1, 64)[e])
        for seed in range(3)
        for e in range(4)
    }
    assert len(set(epochs.values())) == 12


def test_a_shuffle_leaves_no_trace_of_the_corpus_order():
    """Neighbours in the order are no nearer in the corpus than two drawn at random (n / 3)."""
    order = steps(split(4096), 0, 512)
    assert abs(np.abs(np.diff(order)).mean() / (4096 / 3) - 1) < 0.05


def test_unshuffled_is_in_the_order_of_the_corpus():
    assert steps(split(10, shuffle=False), 0, 3).tolist() == [i % 10 for i in range(24)]


# -- mixtures -----------------------------------------------------------------------------------


def mixture(sizes, weights, seed=0):
    firsts = np.cumsum([0, *sizes])
    parts = [numbered(n, first) for n, first in zip(sizes, firsts)]
    return Split(parts, seed=seed, shuffle=True, weights=weights)


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4),
    batch=st.integers(1, 16),
)
@settings(max_examples=15)
def test_a_mixture_keeps_to_its_weights(weights, batch):
    sizes = [600, 5000, 700, 3000][: len(weights)]
    s = mixture(sizes, weights)
    total = 600
    ids = np.concatenate([s.sample_ids(t, batch) for t in range(-(-total // batch))])
    part = np.searchsorted(np.cumsum(sizes), ids, "right")
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        # Grain holds weights as whole numbers of which the least is 100.
        assert abs((part == i).mean() - share) < 0.01 * share + len(weights) / len(ids)


def test_each_part_of_a_mixture_goes_through_epochs_of_its_own():
    ids = steps(mixture([10, 1000], [1, 1]), 0, 100)
    small, large = ids[ids < 10], ids[ids >= 10]
    for epoch in small[:400].reshape(-1, 10):
        assert sorted(epoch) == list(range(10))
    assert len(set(large)) == len(large) == 400


def test_parts_of_one_size_are_not_shuffled_alike():
    ids = steps(mixture([300, 300], [1, 1]), 0, 75)
    first, second = ids[ids < 300], ids[ids >= 300] - 300
    assert sorted(first) == sorted(second) and first.tolist() != second.tolist()


def test_the_parts_of_a_mixture_are_read_where_they_are():
    s = mixture([5, 7, 11], [1, 2, 3])
    for step in range(20):
        assert s.batch(step, 6)["x"].tolist() == s.sample_ids(step, 6).tolist()


def test_an_epoch_of_a_mixture_ends_where_its_first_part_is_through():
    s = mixture([10, 1000], [1, 3])
    assert len(s) == 40
    seen = s.sample_ids(0, 40)
    assert len(set(seen)) == 40 and set(range(10)) <= set(seen)
