"""Parameters dealt to servers: everything has one owner, and the shares weigh alike."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.parameter_server.param_split import AssignableParam, owned_by, split_by_bytes

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def parameters(draw):
    found = draw(st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8))
    return [
        AssignableParam(
            f"p{i}", shape, math.prod(shape) * draw(st.sampled_from([4, 12])), divisible
        )
        for i, (shape, divisible) in enumerate(found)
    ]


@given(parameters(), st.integers(1, 5))
def test_every_element_has_one_owner(given_parameters, servers):
    splits = split_by_bytes(given_parameters, servers)
    assert [*splits] == [p.path for p in given_parameters]
    for one in given_parameters:
        split, owners = splits[one.path], np.zeros(one.shape, int)
        for piece in split.pieces:
            part = split.take(np.arange(owners.size).reshape(split.shape), piece)
            assert part.shape == split.shape_of(piece)
            owners.reshape(-1)[part.reshape(-1)] += 1
        assert (owners == 1).all()


@given(parameters(), st.integers(1, 5))
def test_split_and_join_round_trip(given_parameters, servers):
    for path, split in split_by_bytes(given_parameters, servers).items():
        x = np.random.default_rng(len(path)).normal(size=split.shape)
        np.testing.assert_array_equal(split.join(split.split(x)), x)


@given(parameters(), st.integers(1, 5))
def test_indivisible_parameters_are_not_partitioned(given_parameters, servers):
    splits = split_by_bytes(given_parameters, servers)
    assert all(p.divisible or len(splits[p.path].pieces) == 1 for p in given_parameters)


@given(parameters(), st.integers(1, 5))
def test_servers_bytes_differ_by_at_most_a_row_per_partition(given_parameters, servers):
    every = [AssignableParam(p.path, p.shape, p.nbytes, True) for p in given_parameters]
    rows = [p.nbytes / max(p.shape, default=1) for p in every]
    total, splits = sum(p.nbytes for p in every), split_by_bytes(every, servers)
    sizes = {p.path: p.nbytes / max(np.prod(p.shape), 1) for p in every}
    for server in range(servers):
        own = owned_by(splits, server).items()
        held = sum(np.prod(splits[path].shape_of(piece)) * sizes[path] for path, piece in own)
        assert held <= total / servers + max(rows) + 1e-6


def test_a_large_parameter_is_partitioned_over_all_servers_in_order():
    split = split_by_bytes([AssignableParam("table", (100, 8), 3200, True)], 4)["table"]
    assert split.dim == 0
    assert split.pieces == ((0, 0, 25), (1, 25, 50), (2, 50, 75), (3, 75, 100))
