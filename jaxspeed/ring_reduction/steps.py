"""The two phases of a ring, step by step: chunks are added up on their way round, then handed out.

N ranks each hold an array of N chunks. Going forward, chunk c starts at rank c + 1, goes on to the
next rank in each step, is added to what that rank has of it, and after N - 1 steps is at rank c,
which holds the sum

    ((x[c + 1] + x[c + 2]) + ... + x[c - 1]) + x[c]      (ranks counted round the ring)

in that order, whatever arrives when. Going backward it starts at rank c - 1 and comes down. With
both directions the first half of each chunk (the larger, where it is odd) goes forward and the rest
backward, so that a step sends half as much over each link. The second phase hands each finished
chunk round in N - 1 more steps, as it is: so all ranks hold the same bits.

What travels is packed and unpacked by a `Wire`. What packing loses may be kept by the rank that
packed: each rank packs each chunk once, so the errors of a rank have the shape of what it gave.

Per-device code: `axis` is manual where these are called, and so are all other axes of the mesh.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxspeed.ring_reduction.wire import Wire

Directions = Literal["one", "both"]


@dataclass(frozen=True)
class Ring:
    """The devices along one axis of the mesh, or along several as one, each sending to the next.

    Attributes:
      unrolled: whether the steps are written out one by one. XLA:CPU runs a loop with messages in
        it beside other messages, in an order of its own on each device, and they then wait for each
        other for ever (jax 0.10.2 to 0.12.0); what is written out keeps its order.
    """

    axis: str | tuple[str, ...]
    size: int
    directions: Directions = "both"
    unrolled: bool = False


class Lane(NamedTuple):
    """A part of every chunk, that goes round in one direction."""

    direction: int  # 1: from rank r to r + 1
    start: int  # in the chunk
    length: int


def lanes(length: int, ring: Ring) -> list[Lane]:
    """How a chunk is shared by the directions."""
    if ring.directions == "one":
        return [Lane(1, 0, length)]
    half = length - length // 2
    both = [Lane(1, 0, half), Lane(-1, half, length - half)]
    return [lane for lane in both if lane.length]


def reduce_scatter(x: Array, rank: Array, ring: Ring, wire: Wire) -> tuple[Array, Array | None]:
    """The sum over ranks of this rank's chunk, and what this rank's packing has lost.

    Args:
      x: what this rank has of each chunk, [N, length].
      rank: of this device on the ring, an int32.

    Returns:
      [length], and of a wire with feedback [N, length], zeros for the rank's own chunk.
    """
    if ring.size == 1:
        return x[0], jnp.zeros_like(x) if wire.feedback else None
    split = lanes(x.shape[1], ring)
    parts = [x[:, a.start : a.start + a.length] for a in split]
    errors = [jnp.zeros_like(part) for part in parts] if wire.feedback else []

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        sums, errors = carry
        after, lost = [], []
        for i, (lane, part, held) in enumerate(zip(split, parts, sums)):
            packed = wire.pack(held)
            if wire.feedback:
                sent = _along(rank, -lane.direction * (number + 1), ring)
                error = held - wire.unpack(packed, held)
                lost.append(lax.dynamic_update_index_in_dim(errors[i], error, sent, 0))
            arrived = wire.unpack(_send(packed, lane, ring), held)
            after.append(arrived + _chunk(part, rank, -lane.direction * (number + 2), ring))
        return (after, lost), None

    first = [_chunk(part, rank, -lane.direction, ring) for lane, part in zip(split, parts)]
    sums, errors = _steps(step, (first, errors), ring)
    return jnp.concatenate(sums), jnp.concatenate(errors, axis=1) if errors else None


def handed_round(chunk: Array, rank: Array, ring: Ring) -> Array:
    """The chunks of all ranks, [N, length], from this rank's own [length]."""
    if ring.size == 1:
        return chunk[None]
    split = lanes(chunk.shape[0], ring)
    own = [chunk[a.start : a.start + a.length] for a in split]
    whole = [
        lax.dynamic_update_index_in_dim(jnp.zeros((ring.size, *x.shape), x.dtype), x, rank, 0)
        for x in own
    ]

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        held, whole = carry
        arrived = [_send(x, lane, ring) for lane, x in zip(split, held)]
        whole = [
            lax.dynamic_update_index_in_dim(
                y, x, _along(rank, -lane.direction * (number + 1), ring), 0
            )
            for lane, x, y in zip(split, arrived, whole)
        ]
        return (arrived, whole), None

    _, whole = _steps(step, (own, whole), ring)
    return jnp.concatenate(whole, axis=1)


def _steps(step: Any, carry: Any, ring: Ring) -> Any:
    """The N - 1 steps of a phase."""
    count = ring.size - 1
    return lax.scan(step, carry, jnp.arange(count), unroll=count if ring.unrolled else 1)[0]


def _send(x: Array, lane: Lane, ring: Ring) -> Array:
    pairs = [(r, (r + lane.direction) % ring.size) for r in range(ring.size)]
    return lax.ppermute(x, ring.axis, pairs)


def _chunk(parts: Array, rank: Array, hops: Any, ring: Ring) -> Array:
    return lax.dynamic_index_in_dim(parts, _along(rank, hops, ring), 0, keepdims=False)


def _along(rank: Array, hops: Any, ring: Ring) -> Array:
    """The rank so many hops further on."""
    return jnp.mod(rank + hops, ring.size)
