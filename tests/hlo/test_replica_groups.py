"""The three ways in which XLA writes who takes part, against plain index arithmetic."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from jaxspeed.hlo.replica_groups import axes_of, replica_groups, source_target_pairs

pytestmark = pytest.mark.fast

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def as_sets(groups):
    return {frozenset(group) for group in groups}


def groups_along(shape, dims):
    """Devices, numbered row by row, in groups along which only `dims` vary."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(itertools.product(*map(range, shape))):
        rest = tuple(at for dim, at in enumerate(place) if dim not in dims)
        groups.setdefault(rest, []).append(number)
    return list(groups.values())


def test_lists_are_read_as_they_stand():
    assert replica_groups("{{0,2},{1,3}}", 4) == ((0, 2), (1, 3))
    assert replica_groups("{}", 3) == ((0, 1, 2),)
    assert source_target_pairs("{{0,1},{1,0}}") == ((0, 1), (1, 0))


@given(data=st.data(), shape=sizes)
def test_iota_is_arange_reshaped_and_transposed(data, shape):
    order = data.draw(st.permutations(range(len(shape))))
    total = math.prod(shape)
    count = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    # Walk the transposed array: its row-major order, each place put back into the original's.
    expected = []
    for place in itertools.product(*(range(shape[dim]) for dim in order)):
        original = dict(zip(order, place))
        number = 0
        for dim, size in enumerate(shape):
            number = number * size + original[dim]
        expected.append(number)
    per_group = total // count
    text = f"[{count},{per_group}]<=[{','.join(map(str, shape))}]"
    if list(order) != list(range(len(shape))):
        text += f"T({','.join(map(str, order))})"
    rows = tuple(tuple(expected[i * per_group : (i + 1) * per_group]) for i in range(count))
    assert replica_groups(text, total) == rows


@given(data=st.data(), shape=sizes)
def test_mesh_axes_group_what_differs_along_them(data, shape):
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    axes = ",".join(f"'axis_{dim}'={size}" for dim, size in enumerate(shape))
    named = ",".join(f"'axis_{dim}'" for dim in dims)
    groups = replica_groups(f"mesh[{axes}] {{{named}}}", math.prod(shape))
    assert as_sets(groups) == as_sets(groups_along(shape, dims))


@given(before=st.integers(1, 3), part=st.integers(2, 4), after=st.integers(1, 3))
def test_a_sub_axis_splits_the_axis_into_three(before, part, after):
    text = f"mesh['a'=2,'b'={before * part * after}] {{'b':({before}){part}}}"
    groups = replica_groups(text, 2 * before * part * after)
    assert as_sets(groups) == as_sets(groups_along((2, before, part, after), {2}))


def test_two_sub_axes_of_one_axis_are_the_full_axis():
    text = "mesh['a'=2,'b'=4] {'b':(1)2,'b':(2)2}"
    assert as_sets(replica_groups(text, 8)) == {frozenset(range(4)), frozenset(range(4, 8))}


def test_devices_of_a_mesh_may_be_permuted():
    by_list = replica_groups("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", 4)
    assert as_sets(by_list) == {frozenset({0, 2}), frozenset({1, 3})}
    by_iota = replica_groups("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", 4)
    assert by_iota == by_list


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="unknown format"):
        replica_groups("<something else>", 4)


@given(data=st.data(), shape=st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 6))
def test_axes_are_those_along_which_a_group_differs(data, shape):
    names = ("pipe", "replica", "data", "seq", "expert", "tensor")
    dims = data.draw(st.sets(st.integers(0, 5)))
    mesh = AbstractMesh(shape, names)
    expected = tuple(names[dim] for dim in sorted(dims) if shape[dim] > 1)
    assert axes_of(groups_along(shape, dims), mesh) == expected


def test_axes_of_all_groups_count():
    """A ring over two axes: one pair steps along `tensor` only, another along both."""
    mesh = AbstractMesh((2, 2), ("data", "tensor"))
    ring = [(1, 2), (2, 3), (3, 0), (0, 1)]
    assert axes_of(ring, mesh) == axes_of(ring[::-1], mesh) == ("data", "tensor")
    assert axes_of(ring[-1:], mesh) == ("tensor",)


def test_jaxlib_writes_groups_in_the_ways_that_are_read_here():
    """XLA's own parser and printer take each of them and change nothing."""
    hlo = pytest.importorskip("jaxlib._hlo")
    template = (
        "HloModule m, num_partitions=8\n"
        "add { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b) }\n"
        "ENTRY e { x = f32[8] parameter(0)\n ROOT r = f32[8] all-reduce(x), channel_id=1,"
        " use_global_device_ids=true, replica_groups=%s, to_apply=add }\n"
    )
    for text in (
        "{{0,1},{2,3},{4,5},{6,7}}",
        "[2,4]<=[4,2]T(1,0)",
        "mesh['a'=4,'b'=2] {'a':(2)2,'b'}",
        "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
        "mesh['a'=8], device_ids=(0,2,1,3,4,6,5,7) {'a'}",
    ):
        assert f"replica_groups={text}" in hlo.hlo_module_from_text(template % text).to_string()
        replica_groups(text, 8)
