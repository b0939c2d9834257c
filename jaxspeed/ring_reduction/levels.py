"""Hierarchical reduce-scatter, all-reduce and all-gather: rings within nodes and across nodes.

With two levels each rank first sums its chunk within its node. The ranks that hold the same chunk
in their nodes then form an outer ring, which sums sub-chunks across nodes: node k's sub-chunk
starts at node k + 1. Only a chunk is sent across nodes, not the array.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxspeed.ring_reduction.steps import Ring, ring_all_gather, ring_reduce_scatter
from jaxspeed.ring_reduction.wire import Wire


@dataclass(frozen=True)
class Levels:
    """The inner and outer ring of a reduction, and their message format."""

    inner: Ring
    outer: Ring  # of size 1 where there is one level
    wire: Wire


@dataclass(frozen=True)
class Ranks:
    """This device's rank on each ring, int32."""

    inner: Array
    outer: Array


def hierarchical_reduce_scatter(
    x: Array, ranks: Ranks, levels: Levels
) -> tuple[Array, Array | None]:
    """This rank's chunk [length] of the sum of x [N, length] over all ranks; and the errors."""
    chunk, errors = ring_reduce_scatter(x, ranks.inner, levels.inner, levels.wire)
    if levels.outer.size == 1:  # no further message, so no rounding
        return chunk, errors
    message, like, errors = _across(chunk, errors, ranks, levels)
    return _unpacked(message, like, chunk.size, levels)[0], errors


def hierarchical_all_reduce(x: Array, ranks: Ranks, levels: Levels) -> tuple[Array, Array | None]:
    """The sum over all ranks, [N, length]; and the errors.

    Gathers the messages into which the sums were first packed, so that no level rounds again.
    """
    chunk, errors = ring_reduce_scatter(x, ranks.inner, levels.inner, levels.wire)
    message, like, errors = _across(chunk, errors, ranks, levels)
    messages = ring_all_gather(message.reshape(-1), ranks.inner, levels.inner)
    messages = messages.reshape(-1, message.shape[1])
    return _unpacked(messages, like, chunk.size, levels), errors


def hierarchical_all_gather(chunk: Array, ranks: Ranks, levels: Levels) -> Array:
    """The chunks of a node's ranks, [N, length], for parameters, of which nodes hold replicas."""
    return ring_all_gather(chunk, ranks.inner, levels.inner)


def _across(
    chunk: Array, errors: Array | None, ranks: Ranks, levels: Levels
) -> tuple[Array, Array, Array | None]:
    """Sum a node's chunk over the nodes.

    Returns:
      The packed sub-chunks of the sum [nodes, ...]; an array shaped like one of them unpacked; and
      the errors, including those of this packing.
    """
    wire, nodes = levels.wire, levels.outer.size
    sub_chunks = jnp.pad(chunk, (0, -chunk.size % nodes)).reshape(nodes, -1)
    sub_chunk, lost = ring_reduce_scatter(sub_chunks, ranks.outer, levels.outer, wire)
    message = wire.pack(sub_chunk)
    messages = ring_all_gather(message, ranks.outer, levels.outer)
    if errors is None or lost is None:
        return messages, sub_chunk, None
    lost = lost.at[ranks.outer].set(sub_chunk - wire.unpack(message, sub_chunk))
    return messages, sub_chunk, errors.at[ranks.inner].set(lost.reshape(-1)[: chunk.size])


def _unpacked(messages: Array, like: Array, length: int, levels: Levels) -> Array:
    """Messages of sub-chunks [chunks * nodes, ...] -> chunks [chunks, length]."""
    sub_chunks = jax.vmap(lambda message: levels.wire.unpack(message, like))(messages)
    return sub_chunks.reshape(-1, levels.outer.size * like.size)[:, :length]
