"""Buckets: a rank's chunk has its shard of each leaf, and leaves round-trip."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.ring_reduction import BucketLeaf, buckets_of
from tests.support.covering import examples


@st.composite
def parts(draw):
    """(ranks, leaves), some sharded and some replicated, in two dtypes."""
    ranks, found = draw(st.integers(1, 5)), []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        if dim is not None:
            shape[dim] *= ranks
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        found.append(BucketLeaf(f"leaf{number}", tuple(shape), jnp.dtype(dtype), dim))
    return ranks, found


def filled(found):
    leaves, start = {}, 1
    for part in found:
        values = np.arange(start, start + part.size).reshape(part.shape)
        leaves[part.path], start = values.astype(part.dtype), start + part.size
    return leaves


@settings(deadline=None, max_examples=examples(10, 60))
@given(parts(), st.integers(1, 200))
def test_leaves_round_trip_through_buckets(given_parts, nbytes):
    ranks, found = given_parts
    leaves = filled(found)
    buckets = buckets_of(found, ranks, nbytes)
    assert sorted(p.path for b in buckets for p in b.parts) == sorted(leaves)
    # One program an example: operation by operation, each would be one.
    every = jax.jit(lambda leaves: [bucket.to_chunks(leaves) for bucket in buckets])(leaves)
    back = jax.jit(lambda every: [b.leaves(x) for b, x in zip(buckets, every, strict=True)])(every)
    for bucket, chunks, found_leaves in zip(buckets, every, back, strict=True):
        assert chunks.shape == (ranks, bucket.length)
        assert len({(p.dim is None, p.dtype) for p in bucket.parts}) == 1
        assert len(bucket.parts) == 1 or sum(p.nbytes for p in bucket.parts) <= nbytes
        for path, leaf in found_leaves.items():
            np.testing.assert_array_equal(leaf, leaves[path])


@settings(deadline=None, max_examples=examples(10, 60))
@given(parts())
def test_a_chunk_is_the_shard_that_a_rank_stores(given_parts):
    ranks, found = given_parts
    leaves = filled(found)
    for bucket in buckets_of(found, ranks, 1 << 20):
        chunks = jax.jit(bucket.to_chunks)(leaves)
        both = jax.jit(lambda own, chunk, b=bucket: (b.own_chunk(own), b.shards(chunk)))
        for rank in range(ranks if bucket.is_sharded else 0):
            shards = {
                part.path: np.split(np.asarray(leaves[part.path]), ranks, part.dim)[rank]
                for part in bucket.parts
            }
            chunk, found_shards = both(shards, np.asarray(chunks)[rank])
            np.testing.assert_array_equal(chunk, chunks[rank])
            for path, shard in found_shards.items():
                np.testing.assert_array_equal(shard, shards[path])


def test_small_leaves_share_a_bucket_and_a_large_one_has_its_own():
    sizes = [3, 1000, 4, 5]
    found = [BucketLeaf(str(n), (n,), jnp.dtype("float32")) for n in sizes]
    buckets = buckets_of(found, 2, 64)
    assert sorted(sorted(p.shape for p in b.parts) for b in buckets) == [
        [(3,)],
        [(4,), (5,)],
        [(1000,)],
    ]
    assert math.prod(buckets[1].to_chunks(filled(found)).shape) == 1000
