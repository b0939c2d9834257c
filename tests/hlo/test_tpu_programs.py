"""What XLA:TPU makes of known programs, compiled for a v5e:2x4 that is not here."""

import re
from collections import Counter
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from jaxspeed.communication import ring_elements
from jaxspeed.hlo import collectives, cost, loop_carry_shapes, unknown_loops
from tests.hlo.hlo_programs import AXES
from tests.support.topology import run_on_topology

MIXED = AbstractMesh((1, 1, 4, 1, 1, 2), AXES)
DATA = AbstractMesh((1, 1, 8, 1, 1, 1), AXES)


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    return run_on_topology("tests.hlo.hlo_tpu:compile_all", "v5e:2x4")


@pytest.mark.sampled
def test_fused_all_reduce_scatter_counts_as_reduce_scatter(texts):
    assert "all-reduce(" in texts["zero2"]
    assert " reduce-scatter(" not in texts["zero2"]
    scatters = [
        one
        for one in collectives(texts["zero2"], MIXED)
        if one.kind == "reduce-scatter" and one.axes == ("data",)
    ]
    assert len(scatters) == 1
    (one,) = scatters
    assert (one.bytes, one.dtype, one.leaves) == (1024 * 1024 // 2 * 4, "f32", 1)
    assert one.in_accumulation
    assert one.site.endswith("dot_general")  # the fusion's: what is fused has no name


def test_loops_without_annotation_are_multiplied_out(texts):
    assert "known_trip_count" not in texts["zero2"]
    assert unknown_loops(texts["zero2"]) == ()
    (one,) = [c for c in collectives(texts["zero2"], MIXED) if c.axes == ("data",) and c.runs > 3]
    assert one.runs == 4 * 3  # layers x micro-batches


def test_gather_spread_over_a_chain_of_fusions_counts_once(texts):
    text = texts["zero2"]
    assert "AsyncCollectiveStart" in text, "this program no longer overlaps its gather"
    chains = Counter(re.findall(r" all-gather\(.*?channel_id=(\d+)", text))
    assert max(chains.values()) >= 3  # start, compute that it overlaps with, done
    gathers = [c for c in collectives(text, MIXED) if c.kind == "all-gather"]
    assert len(gathers) == len(chains)


def test_unscanned_zero3_gathers_each_layer_twice_and_scatters_once(texts):
    found = collectives(texts["zero3_units"], DATA)
    assert Counter(one.kind for one in found) == {"all-gather": 12, "reduce-scatter": 6}
    assert {one.axes for one in found} == {("data",)}
    assert {one.bytes for one in found} == {2048 * 2048 * 2}
    # 3 Psi (N-1)/N elements for Psi parameters: two gathers and one reduce-scatter.
    assert sum(map(ring_elements, found)) == 3 * 6 * 2048 * 2048 * 7 / 8


def test_combined_reduce_scatter_names_its_leaves(texts):
    (one,) = [c for c in collectives(texts["reduced_once"], MIXED) if c.kind == "reduce-scatter"]
    assert (one.leaves, one.runs, one.in_accumulation) == (6, 1, False)
    assert one.bytes == 6 * 512 * 512 * 4


def test_padding_is_not_payload_of_a_reduce_scatter(texts):
    text = texts["reduced_once_padded"]
    found = collectives(text, MIXED)
    scatters = [one for one in found if one.kind == "reduce-scatter"]
    assert re.search(r"f32\[4160,4096\]\S* all-reduce\(", text), "XLA no longer pads this one"
    assert [one.bytes for one in scatters] == [4096 * 4096 * 4] * 2
    # The rows that padding displaced are moved to their owners: 64 x (0 + 1 + 2 ...) at most.
    permutes = [one for one in found if one.kind == "collective-permute"]
    assert all(one.bytes < 0.02 * scatters[0].bytes for one in permutes)


def test_the_carry_holds_the_accumulators_and_not_the_weights(texts):
    carry = loop_carry_shapes(texts["zero2"])
    assert ("f32", (4, 256, 512)) in carry  # [layers, width / data 4, width / tensor 2]
    assert not any(shape == (4, 1024, 512) for _, shape in carry)
    assert loop_carry_shapes(texts["reduced_once"]).count(("f32", (512, 512))) == 6


def test_batched_products_cost_what_their_formula_says(texts):
    one_product = 2 * (8 // 8) * 4 * 128 * 128 * 64  # 2 B H Q K D a device
    assert cost(texts["products"]).flops == 3 * one_product


def test_host_bytes_are_separate_from_device_bytes(texts):
    report = texts["offloaded"]
    assert report["host_bytes"] == 512 * 512 * 4
    assert report["argument_bytes"] < 1024
    assert report["output_bytes"] >= 512 * 512 * 4
