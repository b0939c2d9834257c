"""Ring all-reduce: its sum, summation order, number of steps and bytes per link."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.communication import ring_bytes
from jaxspeed.hlo.collectives import collectives
from jaxspeed.ring_reduction import (
    Bucket,
    BucketLeaf,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    steps,
)
from tests.ring_reduction.rings import (
    both_ways,
    in_ring_order,
    levels_of,
    mesh_of,
    numbers,
    program,
)
from tests.support.covering import covering

EPS = {np.dtype(t): float(jnp.finfo(t).eps) for t in (np.float32, np.float16, jnp.bfloat16)}


def summed(levels, x):
    """The sum on every device: [nodes, size, chunks, length]."""
    run = program(levels, lambda x, ranks: hierarchical_all_reduce(x, ranks, levels)[0])
    return np.asarray(run(x))


def sample(seed):
    """One of the random arrays: (N, directions, dtype, shape)."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(0, 4)))
    dtype = [np.float32, jnp.bfloat16, np.float16][seed % 3]
    return int(rng.integers(2, 9)), ["one", "both"][seed // 3 % 2], dtype, shape


@pytest.mark.default_cases("0", every=3)
@pytest.mark.parametrize("seed", covering(range(50), range(16)))
def test_all_reduce_equals_psum_for_any_shape(seed):
    """Fifty shapes, of which most are not divided by N, in three dtypes and both forms."""
    size, directions, dtype, shape = sample(seed)
    levels = levels_of(1, size, directions)
    bucket = Bucket((BucketLeaf("x", shape, dtype),), size)
    rng = np.random.default_rng(seed)
    x = np.asarray(jnp.asarray(rng.normal(size=(1, size, *shape)), dtype))

    def both(x, ranks):
        chunks, _ = hierarchical_all_reduce(bucket.to_chunks({"x": x}), ranks, levels)
        return bucket.leaves(chunks)["x"], jax.lax.psum(x.astype(jnp.float32), "data")

    ours, theirs = map(np.asarray, program(levels, both)(x))
    assert ours.dtype == dtype and ours.shape == (1, size, *shape)
    most = size * EPS[np.dtype(dtype)] * np.abs(x.astype(np.float32)).sum(axis=1, keepdims=True)
    assert (np.abs(ours.astype(np.float32) - theirs) <= most).all()
    assert all((ours[0, 0] == ours[0, r]).all() for r in range(size)), "bits differ by device"


@pytest.mark.parametrize("directions", ["one", "both"])
@pytest.mark.parametrize("length", [1, 6, 7])
def test_summation_order_is_the_documented_one(directions, length):
    levels = levels_of(1, 5, directions)
    x = numbers(levels, length)
    ours = summed(levels, x)
    for chunk in range(5):
        parts = x[0, :, chunk]  # [ranks, length]
        wanted = (
            in_ring_order(parts, chunk) if directions == "one" else both_ways(parts, chunk, None)
        )
        for rank in range(5):
            np.testing.assert_array_equal(ours[0, rank, chunk], wanted)
    assert (ours[0, 0] != x[0].sum(axis=0)).any(), "another order would have given the same bits"


def test_outer_rings_sum_the_nodes_in_order():
    levels = levels_of(3, 2, "one")
    x = numbers(levels, 7)
    ours = summed(levels, x)
    for chunk in range(2):
        nodes = np.stack([in_ring_order(x[node, :, chunk], chunk) for node in range(3)])
        pieces = np.split(np.pad(nodes, ((0, 0), (0, 2))), 3, axis=1)
        wanted = np.concatenate([in_ring_order(p, k) for k, p in enumerate(pieces)])[:7]
        for node, rank in np.ndindex(3, 2):
            np.testing.assert_array_equal(ours[node, rank, chunk], wanted)


@pytest.mark.parametrize("nodes", [1, 2])
def test_looped_steps_equal_unrolled_steps_bitwise(nodes):
    x = numbers(levels_of(nodes, 4), 6)
    unrolled = summed(levels_of(nodes, 4, "one"), x)
    np.testing.assert_array_equal(unrolled, summed(levels_of(nodes, 4, "one", unrolled=False), x))


@pytest.mark.parametrize("nodes", [1, 2])
def test_reduce_scatter_leaves_each_rank_its_chunk(nodes):
    levels = levels_of(nodes, 4)
    x = numbers(levels, 6)
    run = program(levels, lambda x, ranks: hierarchical_reduce_scatter(x, ranks, levels)[0])
    own, full = np.asarray(run(x)), summed(levels, x)
    for node, rank in np.ndindex(nodes, 4):
        np.testing.assert_array_equal(own[node, rank], full[node, rank, rank])


def sent(levels, length, function, dtype=np.float32):
    """The permutes of a program: [(axis, bytes of one, runs)]."""
    x = jax.ShapeDtypeStruct(
        (levels.outer.size, levels.inner.size, levels.inner.size, length), dtype
    )
    run = program(levels, lambda x, ranks: function(x, ranks, levels))
    text = run.lower(x).compile().as_text()
    found = collectives(text, mesh_of(levels))
    assert {c.kind for c in found} == {"collective-permute"}
    return found


@pytest.mark.parametrize(
    ("size", "directions", "unrolled"),
    covering(
        itertools.product([2, 5, 8], ["one", "both"], [True, False]),
        [(2, "one", True), (5, "both", False), (8, "both", True), (8, "one", False)],
    ),
)
def test_all_reduce_sends_2_n_minus_1_chunks_per_device(size, directions, unrolled):
    """2 (N-1)/N of the bytes, in 2 (N-1) steps; of both directions each carries half a step."""
    levels, length = levels_of(1, size, directions, unrolled=unrolled), 60
    found = sent(levels, length, lambda *args: hierarchical_all_reduce(*args)[0])
    array = size * length * 4
    assert sum(map(ring_bytes, found)) == 2 * (size - 1) / size * array
    directions_used = 2 if directions == "both" else 1
    assert sum(c.runs for c in found) == directions_used * 2 * (size - 1)
    assert {c.bytes for c in found} == {length * 4 // directions_used}


def test_reduce_scatter_sends_half_of_an_all_reduce():
    levels = levels_of(1, 8)
    found = sent(levels, 60, lambda *args: hierarchical_reduce_scatter(*args)[0])
    assert sum(map(ring_bytes, found)) == 7 / 8 * 8 * 60 * 4


def test_only_a_chunk_is_sent_across_nodes():
    levels, length = levels_of(2, 4), 60
    found = sent(levels, length, lambda *args: hierarchical_all_reduce(*args)[0])
    by_axis = {
        axis: sum(ring_bytes(c) for c in found if c.axes == (axis,)) for axis in ("data", "replica")
    }
    assert by_axis == {"data": 2 * 3 * length * 4, "replica": 2 * 1 / 2 * length * 4}


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("nodes", [1, 2])
def test_int8_sends_a_quarter_plus_scales(nodes):
    length = 2048 * nodes  # full blocks in each direction
    plain = sum(
        map(
            ring_bytes, sent(levels_of(nodes, 4), length, lambda *a: hierarchical_all_reduce(*a)[0])
        )
    )
    levels = levels_of(nodes, 4, wire="int8")
    narrow = sum(map(ring_bytes, sent(levels, length, hierarchical_all_reduce)))
    assert narrow == plain / 4 * (256 + 4) / 256


@pytest.mark.parametrize(("nodes", "size"), [(1, 5), (2, 3)])
def test_int8_errors_are_saved_by_the_packing_rank(nodes, size):
    """The sum and the errors of all ranks make up the sum that was to be taken."""
    levels = levels_of(nodes, size, wire="int8")
    x = numbers(levels, 700)
    sums, errors = map(
        np.asarray, program(levels, lambda x, r: hierarchical_all_reduce(x, r, levels))(x)
    )
    exact = x.astype(np.float64).sum(axis=(0, 1))
    lost = errors.astype(np.float64).sum(axis=(0, 1))
    scale = np.abs(x).sum(axis=(0, 1)).max()
    assert np.abs(sums[0, 0] - exact).max() > 1e-3 * scale, "nothing was rounded"
    assert np.abs(sums[0, 0] + lost - exact).max() < 1e-5 * scale
    assert (sums == sums[0, 0]).all(), "bits differ by device"


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_packing_keeps_non_finite_values_non_finite(wire, bad):
    levels = levels_of(1, 4, wire=wire)
    x = numbers(levels, 300)
    x[0, 1, 2, 17] = bad
    sums = np.asarray(program(levels, lambda x, r: hierarchical_all_reduce(x, r, levels)[0])(x))
    assert not np.isfinite(sums[0, :, 2, 17]).any()


def test_bf16_rounds_each_message_and_sums_in_the_wider_dtype():
    levels = levels_of(1, 4, "one", wire="bf16")
    x = numbers(levels, 9)
    ours = summed(levels, x)
    for chunk in range(4):
        total = x[0, (chunk + 1) % 4, chunk]
        for hop in range(2, 5):
            total = (
                np.asarray(total.astype(jnp.bfloat16), np.float32) + x[0, (chunk + hop) % 4, chunk]
            )
        np.testing.assert_array_equal(
            ours[0, 0, chunk], np.asarray(total.astype(jnp.bfloat16), np.float32)
        )


def test_a_dropped_ring_step_changes_the_sum(monkeypatch):
    real, calls = steps._send, []

    def one_stays(x, part, ring):
        calls.append(part)
        return x if len(calls) == 2 else real(x, part, ring)

    levels = levels_of(1, 4, "one")
    x = numbers(levels, 6)
    right = summed(levels, x)
    monkeypatch.setattr(steps, "_send", one_stays)
    assert (summed(levels, x) != right).any()
