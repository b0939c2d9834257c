"""Model axes of a leaf: sharded where they divide, padded, replicated or refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.axes import AXES
from jaxspeed.errors import PlacementError
from jaxspeed.placement import Leaf, build_mesh, build_table
from jaxspeed.placement.rules import model_sharding

pytestmark = pytest.mark.fast

TENSOR_NAMES = ("vocab", "heads", "kv_heads", "mlp", "tensor")


def table(leaves, mesh, stage=0):
    count = math.prod(mesh.values())
    return build_table(leaves, build_mesh(mesh, jax.devices()[:count]), stage=stage)


def leaf(path, **dims):
    """A leaf whose dims are `name=size`."""
    names = tuple(name.rstrip("_") for name in dims)
    return Leaf(path, tuple(dims.values()), jnp.float32, names)


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


def bytes_of_a_device(row, placement):
    """Bytes per device as JAX counts them, from the shape that one device holds."""
    sharding = placement.sharding(build_mesh({"data": 2, "tensor": 4}))
    shard = sharding.shard_shape(row.shape(placement))
    return math.prod(shard) * placement.dtype.itemsize


# -- padded ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_vocabulary_that_does_not_divide_is_padded_to_the_next_multiple(stage):
    """257 rows over tensor 4 are 260, 65 on each, at every stage; the columns go over data."""
    made = table([leaf("table", vocab=257, embed=32)], {"data": 2, "tensor": 4}, stage)
    row = made["table"]
    for role, sharded_from in (("param", 3), ("grad", 2), ("opt", 1)):
        placement = getattr(row, role)
        assert row.shape(placement) == (260, 32)
        share = 2 if stage >= sharded_from else 1
        assert bytes_of_a_device(row, placement) == 65 * 32 * 4 // share
    total, per_device = made.bytes_by_role()["param"]
    assert total == 257 * 32 * 4
    assert per_device == 65 * 32 * 4 // (2 if stage == 3 else 1)
    assert row.note == "dim 0 padded 257 -> 260"


def test_both_axes_may_pad_the_same_vocabulary():
    """A bias of the head has no other dim: 257 numbers over 4 x 2 devices are 264."""
    row = table([leaf("bias", vocab=257)], {"data": 2, "tensor": 4}, 3)["bias"]
    assert row.shape(row.read) == (260,) and row.shape(row.param) == (264,)
    assert row.param.spec == jax.sharding.PartitionSpec(("tensor", "data"))


def test_a_vocabulary_that_divides_is_as_it_was():
    row = table([leaf("table", vocab=256, embed=32)], {"data": 2, "tensor": 4})["table"]
    assert row.shape(row.param) == (256, 32) and not row.note


# -- replicated -----------------------------------------------------------------------------------


def test_key_heads_that_do_not_divide_are_replicated_with_a_note():
    made = table(
        [leaf("k", embed=8, kv_heads=2, head_dim=4), leaf("q", embed=8, heads=8, head_dim=4)],
        {"tensor": 8, "data": 1},
    )
    assert not any(made["k"].param.spec) and made["q"].param.spec[1] == "tensor"
    assert made["k"].note == "replicated: 2 kv_heads over tensor 8"
    assert "replicated: 2 kv_heads over tensor 8" in str(made)


# -- refused --------------------------------------------------------------------------------------


def test_all_dims_that_do_not_divide_are_refused_in_one_error_with_the_sizes_that_work():
    block = {"q": {"embed": 72, "heads": 36, "head_dim": 2}, "up": {"embed": 72, "mlp": 60}}
    leaves = [leaf(f"blocks/{i}/{n}", **dims) for i in range(3) for n, dims in block.items()]
    leaves.append(leaf("last/up", embed=72, mlp=96))
    with pytest.raises(PlacementError) as caught:
        table(leaves, {"tensor": 8, "data": 1})
    text = str(caught.value)
    assert "36 heads cannot be sharded over tensor=8: blocks/*/q\n" in text
    assert "60 mlp cannot be sharded over tensor=8: blocks/*/up\n" in text
    assert "last/up" not in text
    # What divides 36, 60 and 96.
    assert "that work for this model: 1, 2, 3, 4, 6, 12; nearest to 8: 6 and 12" in text


def test_experts_are_refused_as_heads_are():
    with pytest.raises(PlacementError, match="6 experts cannot be sharded over expert=4: moe/up"):
        table([leaf("moe/up", experts=6, embed=8)], {"expert": 4, "data": 1})


def test_an_axis_of_one_refuses_nothing():
    row = table([leaf("w", heads=7, mlp=5, vocab=3)], {"data": 2})["w"]
    assert row.shape(row.param) == (7, 5, 3) and not any(row.param.spec)


# -- which dim ------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    data=st.data(),
    tensor=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_the_first_dim_that_fits_is_sharded_and_the_others_are_noted_or_refused(
    shape, data, tensor
):
    names = data.draw(
        st.lists(st.sampled_from([*TENSOR_NAMES, "embed", None]), max_size=len(shape))
    )
    sharding = model_sharding(shape, names, sizes(tensor=tensor))
    meant = [d for d, name in enumerate(names) if name in TENSOR_NAMES] if tensor > 1 else []
    divided = [d for d in meant if shape[d] % tensor == 0]
    padded = [d for d in meant if names[d] == "vocab"]
    wanted = (divided or padded)[:1]
    assert [d for d, entry in enumerate(sharding.spec) if entry] == wanted
    assert all(n % tensor == 0 for d, n in enumerate(sharding.stored_shape) if d in wanted)
    added = np.subtract(sharding.stored_shape, shape)
    assert all(0 <= n < tensor and (d in wanted or n == 0) for d, n in enumerate(added))
    left = [] if wanted else meant
    must = [(names[d], shape[d]) for d in left if names[d] != "kv_heads"]
    assert [(m.name, m.size) for m in sharding.misfits] == must
    assert bool(sharding.note) == bool(left and not must)
