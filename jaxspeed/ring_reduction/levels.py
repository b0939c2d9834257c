"""A ring of ranks, or rings inside of nodes and rings across them.

With two levels each rank first sums its chunk with the others of its node; the ranks that hold the
same chunk in their nodes then make a ring of their own, which sums it across nodes in pieces of a
chunk: node k's piece starts at node k + 1. Across nodes travels so only a chunk, not an array.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxspeed.ring_reduction.steps import Ring, handed_round, reduce_scatter
from jaxspeed.ring_reduction.wire import Wire


@dataclass(frozen=True)
class Levels:
    """The rings that an array goes round, and what travels."""

    inner: Ring
    outer: Ring  # of size 1 where there is one level
    wire: Wire


@dataclass(frozen=True)
class Ranks:
    """Where this device stands on each ring, int32."""

    inner: Array
    outer: Array


def sum_of_chunk(x: Array, ranks: Ranks, levels: Levels) -> tuple[Array, Array | None]:
    """The sum over all ranks of this rank's chunk, [length] of x [N, length]; and the errors."""
    chunk, errors = reduce_scatter(x, ranks.inner, levels.inner, levels.wire)
    if levels.outer.size == 1:  # nothing more is sent, and nothing rounded
        return chunk, errors
    message, like, errors = _across(chunk, errors, ranks, levels)
    return _unpacked(message, like, chunk.size, levels)[0], errors


def sum_of_all(x: Array, ranks: Ranks, levels: Levels) -> tuple[Array, Array | None]:
    """The sum over all ranks, [N, length]; and the errors.

    What is handed round is the message in which a sum was packed first, so that no level rounds
    again.
    """
    chunk, errors = reduce_scatter(x, ranks.inner, levels.inner, levels.wire)
    message, like, errors = _across(chunk, errors, ranks, levels)
    messages = handed_round(message.reshape(-1), ranks.inner, levels.inner)
    messages = messages.reshape(-1, message.shape[1])
    return _unpacked(messages, like, chunk.size, levels), errors


def gathered(chunk: Array, ranks: Ranks, levels: Levels) -> Array:
    """The chunks of a node's ranks as they are, [N, length]: parameters, which nodes have alike."""
    return handed_round(chunk, ranks.inner, levels.inner)


def _across(
    chunk: Array, errors: Array | None, ranks: Ranks, levels: Levels
) -> tuple[Array, Array, Array | None]:
    """The messages that a node's chunk is summed up in over all nodes, [nodes, ...]; an array like
    what one of them holds; and the errors with those of this packing."""
    wire, nodes = levels.wire, levels.outer.size
    pieces = jnp.pad(chunk, (0, -chunk.size % nodes)).reshape(nodes, -1)
    piece, lost = reduce_scatter(pieces, ranks.outer, levels.outer, wire)
    message = wire.pack(piece)
    messages = handed_round(message, ranks.outer, levels.outer)
    if errors is None or lost is None:
        return messages, piece, None
    lost = lost.at[ranks.outer].set(piece - wire.unpack(message, piece))
    return messages, piece, errors.at[ranks.inner].set(lost.reshape(-1)[: chunk.size])


def _unpacked(messages: Array, like: Array, length: int, levels: Levels) -> Array:
    """Chunks from the messages of their pieces: [chunks * nodes, ...] -> [chunks, length]."""
    pieces = jax.vmap(lambda message: levels.wire.unpack(message, like))(messages)
    return pieces.reshape(-1, levels.outer.size * like.size)[:, :length]
