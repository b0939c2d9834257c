"""Properties of meshes, ZeRO's sharding and the table's roles, for generated sizes."""

import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxspeed.axes import AXES
from jaxspeed.errors import PlacementError
from jaxspeed.placement.mesh import build_mesh, resolve_sizes
from jaxspeed.placement.table import Leaf, Precision, build_table
from jaxspeed.placement.zero import shard_leaf, window_dims

pytestmark = pytest.mark.fast

NAMES = (None, "embed", "mlp", "heads", "head_dim", "vocab", "layers")
COUNTS = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@st.composite
def leaves(draw):
    """A leaf whose model axes divide their dims, as the rules see to."""
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=len(shape), max_size=len(shape)))
    tensor = draw(COUNTS)
    taken = draw(st.integers(-1, len(shape) - 1))
    spec = ["tensor" if d == taken and shape[d] % tensor == 0 else None for d in range(len(shape))]
    return Leaf("w", tuple(shape), jnp.float32, tuple(names)), PartitionSpec(*spec), tensor


def axis_sizes(data, tensor):
    return dict.fromkeys(AXES, 1) | {"data": data, "tensor": tensor}


def shards_of(entry, sizes):
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(sizes[axis] for axis in axes)


# -- ZeRO sharding --------------------------------------------------------------------------------


@given(leaves(), COUNTS)
def test_a_cut_divides_and_holds_the_whole_leaf(made, data):
    leaf, spec, tensor = made
    sizes = axis_sizes(data, tensor)
    sharding = shard_leaf(leaf.shape, spec, leaf.names, sizes)
    assert (sharding is None) == (data == 1)
    if sharding is None:
        return
    shards = [shards_of(entry, sizes) for entry in sharding.spec]
    assert all(n % w == 0 for n, w in zip(sharding.stored_shape, shards, strict=True))
    assert all(a <= b for a, b in zip(leaf.shape, sharding.stored_shape, strict=True))
    # `data` once, and the model axes where they were.
    flat = [
        a for entry in sharding.spec for a in ((entry,) if isinstance(entry, str) else entry or ())
    ]
    assert sorted(flat) == sorted([*filter(None, spec), "data"])
    for before, after in zip(spec, sharding.spec, strict=True):
        assert before is None or (after if isinstance(after, str) else after[0]) == before


@given(leaves(), COUNTS)
def test_padding_is_on_one_dim_and_less_than_a_shard_each(made, data):
    """Fewer added rows than shards, and none where a dim that may be sharded divides as it is."""
    leaf, spec, tensor = made
    sizes = axis_sizes(data, tensor)
    sharding = shard_leaf(leaf.shape, spec, leaf.names, sizes)
    assume(sharding is not None)
    added = [b - a for a, b in zip(leaf.shape, sharding.stored_shape, strict=True)]
    assert sum(n > 0 for n in added) <= 1
    assert all(n < shards_of(e, sizes) for n, e in zip(added, sharding.spec, strict=True))
    window = window_dims(leaf.shape, leaf.names)
    divides = any(
        name not in ("layers", "vocab")
        and dim not in window
        and size % (data * shards_of(entry, sizes)) == 0
        for dim, (size, name, entry) in enumerate(zip(leaf.shape, leaf.names, spec, strict=True))
    )
    if divides:
        assert not any(added)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), COUNTS)
def test_the_stack_of_layers_is_cut_only_to_save_a_quarter(shape, data):
    """A scan slices it: one layer is to be gathered at a time."""
    names = ["layers", *["embed"] * (len(shape) - 1)]
    sharding = shard_leaf(shape, PartitionSpec(), names, axis_sizes(data, 1))
    if sharding is not None and sharding.spec[0] == "data":
        padding = -shape[0] % data / shape[0]
        assert all(-size % data / size >= padding + 0.25 for size in shape[1:])


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(17, 64),
    st.booleans(),
    COUNTS,
)
def test_a_convolutions_kernel_is_not_cut_on_its_window(window, few, features, turned, data):
    """[*window, in, out], however well its window divides; padding at most doubles it."""
    assume(window[0] * few != features or len(window) > 1)
    shape = [*window, *((features, few) if turned else (few, features))]
    sharding = shard_leaf(shape, PartitionSpec(), (), axis_sizes(data, 1))
    if sharding is not None:
        assert sharding.spec[-1] == "data" or sharding.spec[-2] == "data"
        assert math.prod(sharding.stored_shape) <= 2 * math.prod(shape)


@pytest.mark.parametrize("shape", [(512, 8, 64), (12, 64, 768), (32, 512, 8, 64)])
def test_attention_without_names_has_no_window(shape):
    """[embed, heads, head_dim], [heads, head_dim, embed]; of a stack only the layers."""
    assert window_dims(shape, [None] * len(shape)) == set(range(len(shape) - 3))


# -- meshes ---------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(list(AXES)), COUNTS), COUNTS, st.sampled_from(list(AXES)))
def test_a_free_axis_takes_what_is_left(sizes, left, free):
    sizes = {**sizes, "data": sizes.get("data", 1), free: -1}
    devices = left * math.prod(n for n in sizes.values() if n != -1)
    full = resolve_sizes(sizes, devices)
    assert tuple(full) == tuple(AXES)
    assert full[free] == left and math.prod(full.values()) == devices
    assert all(full[axis] == n for axis, n in sizes.items() if axis != free)


@given(st.dictionaries(st.sampled_from(list(AXES)), st.integers(1, 8)), st.integers(1, 64))
def test_a_mesh_fits_all_devices_or_is_refused_with_their_number(sizes, devices):
    sizes = {**sizes, "data": sizes.get("data", 1)}
    if math.prod(sizes.values()) == devices:
        assert math.prod(resolve_sizes(sizes, devices).values()) == devices
    else:
        with pytest.raises(PlacementError, match=str(devices)):
            resolve_sizes(sizes, devices)


# -- the table ------------------------------------------------------------------------------------

# Role by stage: is it sharded over data? None: it is not stored (design.md, "The one idea").
MIXED = {
    "param": (False, False, False, None),
    "master": (False, True, True, True),
    "grad": (False, False, True, True),
    "opt": (False, True, True, True),
}
PURE = {**MIXED, "param": (False, False, False, True), "master": (None,) * 4}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mixed", [True, False])
@given(made=leaves())
def test_roles_gain_the_data_axis_as_the_stage_says(stage, mixed, made):
    leaf, _, _ = made
    precision = Precision(compute=jnp.bfloat16 if mixed else None)
    for data in (2, 8):
        mesh = build_mesh({"data": data}, jax.devices()[:data])
        row = build_table([leaf], mesh, stage=stage, precision=precision)["w"]
        for role, cut_at in (MIXED if mixed else PURE).items():
            placement = getattr(row, role)
            if cut_at[stage] is None:
                assert placement is None
                continue
            assert ("data" in str(placement.spec)) == cut_at[stage]
            narrow = mixed and role == "param"
            assert placement.dtype == (jnp.bfloat16 if narrow else jnp.float32)


@given(made=leaves(), threshold=st.integers(1, 5000))
def test_small_leaves_are_read_whole_under_stage_3(made, threshold):
    leaf, _, _ = made
    row = build_table([leaf], build_mesh({}), stage=3, persistence_threshold=threshold)["w"]
    small = math.prod(leaf.shape) < threshold
    assert ("data" in str(row.param.spec)) != small
    assert "data" in str(row.opt.spec)
