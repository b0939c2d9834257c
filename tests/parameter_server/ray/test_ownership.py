"""Parameters dealt to servers: everything has one owner, and the shares weigh alike."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.parameter_server.ray.ownership import AssignableParam, assign_params

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
    owners = {p.path: np.zeros(p.shape, int) for p in given_parameters}
    for own in assign_params(given_parameters, servers):
        for path, piece in own.items():
            part = piece.of(np.arange(owners[path].size).reshape(piece.shape))
            assert part.shape == piece.shard_shape
            owners[path].reshape(-1)[part.reshape(-1)] += 1
    assert all((count == 1).all() for count in owners.values())


@given(parameters(), st.integers(1, 5))
def test_indivisible_parameters_are_not_partitioned(given_parameters, servers):
    dealt = assign_params(given_parameters, servers)
    for one in given_parameters:
        has = [own[one.path] for own in dealt if one.path in own]
        assert one.divisible or (len(has) == 1 and has[0].is_full)


@given(parameters(), st.integers(1, 5))
def test_servers_bytes_differ_by_at_most_a_row_per_partition(given_parameters, servers):
    every = [AssignableParam(p.path, p.shape, p.nbytes, True) for p in given_parameters]
    rows = [p.nbytes / max(p.shape, default=1) for p in every]
    total = sum(p.nbytes for p in every)

    def weight(own):
        sizes = {p.path: p.nbytes / max(np.prod(p.shape), 1) for p in every}
        return sum(np.prod(piece.shard_shape) * sizes[path] for path, piece in own.items())

    for own in assign_params(every, servers):
        assert weight(own) <= total / servers + max(rows) + 1e-6


def test_a_large_parameter_is_partitioned_over_all_servers_in_order():
    (table,) = [AssignableParam("table", (100, 8), 3200, True)]
    pieces = [own["table"] for own in assign_params([table], 4)]
    assert [(p.dim, p.start, p.stop) for p in pieces] == [
        (0, 0, 25),
        (0, 25, 50),
        (0, 50, 75),
        (0, 75, 100),
    ]
