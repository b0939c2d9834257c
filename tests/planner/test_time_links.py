"""Links and times of collectives, by the textbook formulas."""

import pytest

from jaxspeed.axes import AXES
from jaxspeed.communication import TO_HOST, Communication
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.time.links import Links

pytestmark = pytest.mark.fast

GB = 1_000_000_000


def links(target, **sizes):
    return Links(target_of(target), {axis: sizes.get(axis, 1) for axis in AXES})


def moved(kind, *axes, payload=GB):
    return Communication(kind, axes, payload, 1, "trace")


def test_an_axis_sends_in_both_directions_of_each_of_its_torus_dims():
    found = links("v5p:4x4x4", data=16, tensor=4)
    assert found.route(("tensor",)).parallel_links == 2
    assert found.route(("data",)).parallel_links == 4
    assert found.route(("data", "tensor")).parallel_links == 6


def test_a_slice_that_is_not_closed_sends_one_way():
    assert links("v5e:4x4", data=16).route(("data",)).parallel_links == 2
    assert links("v5e:16x16", data=256).route(("data",)).parallel_links == 4


@pytest.mark.parametrize(
    ("target", "axis", "found"),
    [
        # A ring of 4, as 2 x 2: neighbours share no link; pairs two apart, each of two ways.
        ("v5p:4x4x4", "tensor", (2 + 1, 2 + 1, 1)),  # x 4, y 2
        ("v5p:4x4x4", "data", (2 + 1, 2 + 2, 2)),  # y 2 with stride 2, z 4
        # Lines of 4 and 8, as 2 x 2 and 4 x 2: no way around, two groups on a link.
        ("v6e:4x8", "tensor", (1, 1, 1)),  # x 2
        ("v6e:4x8", "data", (1 / 2 + 1, 2 + 1, 2)),  # x 2 with stride 2, y 2
        ("v6e:4x8", "pipe", (1 / 2, 6, 2)),  # y 4 with stride 2
    ],
)
def test_groups_that_are_interleaved_on_a_dim_share_its_links(target, axis, found):
    sizes = {"data": 8, "tensor": 8} if "v5p" in target else {"pipe": 4, "data": 4, "tensor": 2}
    route = links(target, **sizes).route((axis,))
    assert (route.parallel_links, route.hops, route.sharing) == found


def test_a_message_to_a_neighbour_with_a_stride_shares_the_links_on_its_way():
    split = links("v6e:4x8", pipe=4, data=4, tensor=2)
    whole = links("v6e:4x8", pipe=4, data=8)
    one = moved("collective-permute", "pipe")
    assert split.seconds(one) == pytest.approx(2 * whole.seconds(one))


def test_an_all_to_all_loads_the_links_alike_whether_groups_are_interleaved_or_not():
    """All chips of a ring of 16 send over half of it, on both links: V times 16 / 4 hops over 2."""
    found = links("v6e:16x16", pipe=4, data=4, tensor=16)
    assert found.route(("pipe",)).sharing == 4
    rate = found.target.chip.link * found.target.chip.reached["links"]
    seconds = found.seconds(moved("all-to-all", "pipe"), latency=False)
    assert seconds == pytest.approx(GB * 3 / 4 * 16 / 4 / 2 / rate)


def test_a_gather_takes_its_bytes_over_all_lanes():
    """V / W of https://jax-ml.github.io/scaling-book/sharding, W of both ways, and a hop's time."""
    found = links("v5p:4x4x4", data=16, tensor=4)
    rate = 100 * GB * found.target.chip.reached["links"] * 2
    assert found.seconds(moved("all-gather", "tensor")) == pytest.approx(
        GB * 3 / 4 / rate + 2e-6, rel=1e-3
    )
    twice = found.seconds(moved("all-reduce", "tensor"))
    assert twice == pytest.approx(2 * found.seconds(moved("all-gather", "tensor")))


def test_gpus_of_a_node_share_nvlink_and_others_the_network():
    found = links("h100:64", data=8, tensor=8)
    assert found.link(moved("all-gather", "tensor")) == "links"
    assert found.link(moved("all-gather", "data")) == "network"
    route = found.route(("data", "tensor"))
    assert (route.inside, route.across) == (8, 8)


def test_over_nodes_each_device_sends_its_part_of_the_node():
    found = links("h100:64", data=64)
    chip = found.target.chip
    across = GB * 7 / 8 / 8 / (chip.outside * chip.reached["outside"])
    within = GB * 7 / 8 / (chip.link * chip.reached["links"])
    seconds = found.seconds(moved("all-gather", "data"), latency=False)
    assert seconds == pytest.approx(max(across, within))


def test_slices_do_one_after_the_other():
    found = links("2x v5p:4x4x4", replica=2, data=64)
    chip = found.target.chip
    across = 2 * GB / 2 / 64 / (chip.outside * chip.reached["outside"])
    within = 2 * GB * 63 / 64 / (chip.link * chip.reached["links"] * 6)
    seconds = found.seconds(moved("all-reduce", "replica", "data"), latency=False)
    assert seconds == pytest.approx(across + within)
    assert found.link(moved("all-reduce", "replica")) == "network"


def test_what_crosses_to_the_host():
    found = links("h100:8", data=8)
    assert found.link(moved(TO_HOST)) == "host"
    assert found.seconds(moved(TO_HOST)) == pytest.approx(1 / (64 * 0.88))
