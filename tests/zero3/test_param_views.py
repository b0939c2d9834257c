"""Merging and splitting dims of a stored parameter keeps every element on its device."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.placement import build_mesh
from jaxspeed.zero3.param_views import view
from jaxspeed.zero3.sharded_param import ShardedParam

MESH = {"data": 4, "tensor": 2}


def reshaped(shape, tensor_dim, new):
    """(the view, its new storage) of a parameter sharded over `data` on its last dim."""
    mesh = build_mesh(MESH)
    entries = ["tensor" if d == tensor_dim else None for d in range(len(shape))]
    stored = ShardedParam(
        tuple(shape),
        np.float32,
        NamedSharding(mesh, P(*entries)),
        NamedSharding(mesh, P(*entries[:-1], "data")),
    )
    x = jax.ShapeDtypeStruct(tuple(shape), np.float32)
    (eqn,) = jax.make_jaxpr(lambda x: x.reshape(new))(x).jaxpr.eqns
    return view(eqn, stored, tuple(shape))


def elements(values, sharding):
    """The elements of each device."""
    places = sharding.devices_indices_map(values.shape)
    return {device: set(values[index].ravel()) for device, index in places.items()}


@st.composite
def reshapes(draw):
    """Dims in front of the last one, as one set of factors folded twice."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))

    def folded():
        ends = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        dims, last = [], 1
        for factor, end in zip(factors, ends, strict=True):
            last *= factor
            if end:
                dims.append(last)
                last = 1
        return [*dims, last]

    old, new = folded(), folded()
    return old, new, draw(st.sampled_from([d for d, n in enumerate(old) if n % 2 == 0] or [None]))


@given(reshapes())
def test_a_view_leaves_every_element_on_its_device(made):
    old, new, tensor_dim = made
    shape, new = (*old, 4), (*new, 4)
    if shape == new:
        return
    found = reshaped(shape, tensor_dim, new)
    if found is None:
        return
    _, stored = found
    values = np.arange(math.prod(shape)).reshape(shape)
    entries = ["tensor" if d == tensor_dim else None for d in range(len(old))]
    before = NamedSharding(stored.sharding.mesh, P(*entries, "data"))
    assert elements(values, before) == elements(values.reshape(new), stored.sharding)
    assert stored.gathered.spec == P(*stored.sharding.spec[:-1], None)


@pytest.mark.parametrize(
    ("old", "tensor_dim", "new", "spec"),
    [
        ((12, 4), 0, (2, 6, 4), P("tensor", None, "data")),  # the shards of a vocabulary
        ((2, 12, 4), 0, (2, 3, 4, 4), P("tensor", None, None, "data")),  # and their chunks
        ((12, 4), None, (3, 4, 4), P(None, None, "data")),
        ((2, 3, 4), 0, (6, 4), P("tensor", "data")),
        ((3, 2, 4), 1, (6, 4), None),  # the shards of an inner dim are not contiguous
        ((6, 4), 0, (3, 2, 4), None),  # and here a shard ends inside of the outer one
        ((12, 4), 0, (12, 2, 2), None),  # the dim that is sharded over data
    ],
)
def test_which_reshapes_are_views(old, tensor_dim, new, spec):
    found = reshaped(old, tensor_dim, new)
    assert (found is None) == (spec is None)
    if found is not None:
        params, stored = found
        assert params["new_sizes"] == new and stored.shape == new
        assert stored.sharding.spec == spec
