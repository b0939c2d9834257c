"""Batch arithmetic, against a search over all triples, and DeepSpeed's elastic table."""

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxspeed.config import Batch, Config, load_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

SIZE = st.integers(1, 24)
MAYBE = st.none() | SIZE


def every_triple(train, micro, accumulation, ranks):
    """All (train, micro, accumulation) that agree with what is given, by search."""
    bound = 24 * 24 * 24
    for m in [micro] if micro else range(1, 25):
        for a in [accumulation] if accumulation else range(1, bound // (m * ranks) + 1):
            if train in (None, m * a * ranks):
                yield m * a * ranks, m, a


@given(train=st.none() | st.integers(1, 200), micro=MAYBE, accumulation=MAYBE, ranks=SIZE)
def test_a_triple_is_solved_exactly_when_it_can_be(train, micro, accumulation, ranks):
    alone = (train is None) != (micro is None)
    accumulation_for_search = accumulation or (1 if alone else None)
    micro_for_search = micro
    if train and not micro:  # a search over micro sizes must reach beyond 24
        per = accumulation_for_search * ranks
        micro_for_search = train // per if train % per == 0 else 10**9
    said = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    found = (
        []
        if train is None and micro is None
        else list(every_triple(train, micro_for_search, accumulation_for_search, ranks))
    )
    try:
        batch = Config.load({k: v for k, v in said.items() if v is not None}).batch(ranks)
    except ConfigError:
        assert not found
    else:
        assert found == [(batch.train, batch.micro, batch.accumulation)]


@pytest.mark.parametrize(
    ("said", "ranks", "batch"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 8, Batch(64, 4, 2)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, Batch(64, 2, 4)),
        (
            {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5},
            2,
            Batch(30, 3, 5),
        ),
        ({"train_batch_size": 64}, 8, Batch(64, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, 8, Batch(32, 4, 1)),
    ],
)
def test_any_two_give_the_third_and_one_gives_accumulation_one(said, ranks, batch):
    assert Config(**said).batch(ranks) == batch


def test_the_error_prints_the_equation_and_the_nearest_values():
    config = Config(train_batch_size=100, train_micro_batch_size_per_gpu=2)
    with pytest.raises(ConfigError) as caught:
        config.batch(8)
    message = str(caught.value)
    assert (
        "train_batch_size 100 = train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps ? "
        "x data-parallel size 8" in message
    )
    assert "train_batch_size 96 or 112; data-parallel size 5 or 10" in message


def test_the_error_of_a_full_triple_names_each_value_that_would_repair_it():
    config = Config(
        train_batch_size=96, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2
    )
    with pytest.raises(ConfigError) as caught:
        config.batch(6)
    message = str(caught.value)
    assert "train_batch_size 48; data-parallel size 12" in message
    assert "train_micro_batch_size_per_gpu 8" in message
    assert "gradient_accumulation_steps 4" in message


@given(train=st.integers(1, 300), micro=SIZE, accumulation=MAYBE, ranks=SIZE)
def test_every_value_that_an_error_proposes_works(train, micro, accumulation, ranks):
    said = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro}
    if accumulation:
        said["gradient_accumulation_steps"] = accumulation
    try:
        Config(**said).batch(ranks)
    except ConfigError as error:
        proposals = str(error).partition("Would work: ")[2].rstrip(".").split("; ")
        assert proposals != [""]
        for key, values in (re.fullmatch(r"(.+?) (\d.*)", item).groups() for item in proposals):
            for value in map(int, values.split(" or ")):
                if key == "data-parallel size":
                    assert Config(**said).batch(value)
                elif "data-parallel size ?" in str(error):
                    assert Config(**said | {key: value})  # right for some number of devices
                else:
                    assert Config(**said | {key: value}).batch(ranks)


def test_without_any_size_the_batch_is_an_error():
    with pytest.raises(ConfigError, match="found no batch size"):
        Config().batch(8)


def elastic(**keys):
    return Config(elasticity={"enabled": True, "version": 0.1, **keys})


TEN_THOUSAND = {
    "max_train_batch_size": 10_000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
}


def fits(config, ranks):
    try:
        config.batch(ranks)
    except ConfigError:
        return False
    return True


def test_the_elastic_batch_of_10000_is_9792_with_23_device_counts():
    config = elastic(**TEN_THOUSAND)
    counts = [ranks for ranks in range(1, 1600) if fits(config, ranks)]
    assert len(counts) == 23
    assert {config.batch(ranks).train for ranks in counts} == {9792}
    for ranks in counts:
        batch = config.batch(ranks)
        assert batch.micro in TEN_THOUSAND["micro_batch_sizes"]
        assert batch.micro * batch.accumulation * ranks == 9792


def test_an_elastic_count_outside_the_table_names_its_neighbours():
    config = elastic(**TEN_THOUSAND)
    counts = [ranks for ranks in range(1, 1600) if fits(config, ranks)]
    outside = next(ranks for ranks in range(counts[0], 1600) if ranks not in counts)
    below = max(count for count in counts if count < outside)
    above = min(count for count in counts if count > outside)
    with pytest.raises(ConfigError, match=f"Would work: {below} or {above}, of the 23"):
        config.batch(outside)


def test_the_table_has_the_device_counts_within_the_bounds():
    bounds = {"min_gpus": 3, "max_gpus": 8}
    config = elastic(max_train_batch_size=24, micro_batch_sizes=[1], **bounds)
    assert [ranks for ranks in range(1, 30) if fits(config, ranks)] == [3, 4, 6, 8]


def test_a_batch_outside_of_the_section_is_ignored_where_that_is_asked_for():
    keys = {"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7]}
    elasticity = {"enabled": True, **keys, "ignore_non_elastic_batch_info": True}
    assert Config(train_batch_size=8, elasticity=elasticity).batch(4) == Batch(24, 3, 2)


def test_the_largest_micro_batch_that_divides_is_taken():
    config = elastic(max_train_batch_size=32, micro_batch_sizes=[1, 2, 3, 7], max_gpus=1500)
    assert config.batch(4) == Batch(24, 3, 2)


def divisor_counts(limit):
    counts = [0] * (limit + 1)
    for divisor in range(1, limit + 1):
        for multiple in range(divisor, limit + 1, divisor):
            counts[multiple] += 1
    return counts


@given(
    most=st.integers(1, 3000),
    micros=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    larger=st.booleans(),
)
@example(most=7, micros=[4, 6], larger=True)  # 6 and 4 have as many counts: the preference decides
@example(most=7, micros=[4, 6], larger=False)
def test_the_elastic_table_is_the_best_candidate_of_a_plain_search(most, micros, larger):
    if max(micros) > most:
        return
    counts = divisor_counts(most)
    composites = [n for n in range(1, most + 1) if counts[n] > max(counts[:n])]
    tables = {}
    for base in {*micros, math.lcm(*micros)}:
        if base <= most:
            train = base * max(n for n in composites if n <= most // base)
            tables[train] = {
                ranks
                for ranks in range(1, train + 1)
                if any(train % (micro * ranks) == 0 for micro in micros)
            }
    sign = 1 if larger else -1
    best = max(tables, key=lambda train: (len(tables[train]), sign * train))
    config = elastic(
        max_train_batch_size=most, micro_batch_sizes=micros, prefer_larger_batch=larger
    )
    assert config.batch(1).train == best
    for ranks in range(1, min(best, 50) + 1):
        assert fits(config, ranks) == (ranks in tables[best])


def test_of_two_batches_with_as_many_counts_the_config_chooses():
    """6 and 4 of at most 6 samples: each for three device counts."""
    keys = {"max_train_batch_size": 6, "micro_batch_sizes": [4, 6]}
    assert elastic(**keys).batch(1).train == 6
    assert elastic(**keys, prefer_larger_batch=False).batch(1).train == 4


def test_the_mesh_words_give_the_data_parallel_size_at_load():
    tree = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "data_parallel_size": 4}
    with pytest.raises(ConfigError, match="x data-parallel size 4"):
        load_config(tree)
