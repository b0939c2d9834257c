"""Ring reduce-scatter and ring all-gather with `ppermute`, in a documented order of summation.

N ranks each hold an array of N chunks. Going forward, chunk c starts at rank c + 1, is sent to the
next rank in each step and added to that rank's chunk c, and after N - 1 steps is at rank c, which
holds the sum

    ((x[c + 1] + x[c + 2]) + ... + x[c - 1]) + x[c]      (ranks counted round the ring)

in that order, whatever arrives when. Going backward it starts at rank c - 1 and moves to lower
ranks. With both directions the first half of each chunk (the larger, if it is odd) goes forward and
the rest backward, so that a step sends half as much over each link. The all-gather sends each
reduced chunk around in N - 1 more steps, unchanged: all ranks end with the same bits.

A `Wire` packs and unpacks the messages of the reduce-scatter. The rank that packed may save the
packing errors: each rank packs each chunk once, so its errors have the shape of its input.

Per-device code: call it where `axis` and all other axes of the mesh are manual.
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
      unrolled: whether the loop over steps is unrolled. XLA:CPU runs a loop with collectives
        concurrently with other collectives, in a different order on each device, and deadlocks
        (jax 0.11.2 to 0.12.0); unrolled steps keep their order.
    """

    axis: str | tuple[str, ...]
    size: int
    directions: Directions = "both"
    unrolled: bool = False


class DirectedSlice(NamedTuple):
    """The slice of every chunk that is sent in one direction."""

    direction: int  # 1: from rank r to r + 1
    start: int  # in the chunk
    length: int


def directed_slices(length: int, ring: Ring) -> list[DirectedSlice]:
    """A chunk's slices by direction."""
    if ring.directions == "one":
        return [DirectedSlice(1, 0, length)]
    half = length - length // 2
    both = [DirectedSlice(1, 0, half), DirectedSlice(-1, half, length - half)]
    return [one for one in both if one.length]


def ring_reduce_scatter(
    x: Array, rank: Array, ring: Ring, wire: Wire
) -> tuple[Array, Array | None]:
    """Sum this rank's chunk over the ranks; also the errors of this rank's packing.

    Args:
      x: this rank's addends of each chunk, [N, length].
      rank: of this device on the ring, an int32.

    Returns:
      [length], and for a wire with feedback [N, length], zeros for the rank's own chunk.
    """
    if ring.size == 1:
        return x[0], jnp.zeros_like(x) if wire.feedback else None
    slices = directed_slices(x.shape[1], ring)
    parts = [x[:, a.start : a.start + a.length] for a in slices]
    errors = [jnp.zeros_like(part) for part in parts] if wire.feedback else []

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        sums, errors = carry
        after, lost = [], []
        for i, (a, part, held) in enumerate(zip(slices, parts, sums)):
            packed = wire.pack(held)
            if wire.feedback:
                sent = _rank_after(rank, -a.direction * (number + 1), ring)
                error = held - wire.unpack(packed, held)
                lost.append(lax.dynamic_update_index_in_dim(errors[i], error, sent, 0))
            arrived = wire.unpack(_send(packed, a, ring), held)
            after.append(arrived + _chunk(part, rank, -a.direction * (number + 2), ring))
        return (after, lost), None

    first = [_chunk(part, rank, -a.direction, ring) for a, part in zip(slices, parts)]
    sums, errors = _steps(step, (first, errors), ring)
    return jnp.concatenate(sums), jnp.concatenate(errors, axis=1) if errors else None


def ring_all_gather(chunk: Array, rank: Array, ring: Ring) -> Array:
    """The chunks of all ranks, [N, length], from this rank's [length]."""
    if ring.size == 1:
        return chunk[None]
    slices = directed_slices(chunk.shape[0], ring)
    own = [chunk[a.start : a.start + a.length] for a in slices]
    gathered = [
        lax.dynamic_update_index_in_dim(jnp.zeros((ring.size, *x.shape), x.dtype), x, rank, 0)
        for x in own
    ]

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        held, gathered = carry
        arrived = [_send(x, a, ring) for a, x in zip(slices, held)]
        gathered = [
            lax.dynamic_update_index_in_dim(
                y, x, _rank_after(rank, -a.direction * (number + 1), ring), 0
            )
            for a, x, y in zip(slices, arrived, gathered)
        ]
        return (arrived, gathered), None

    _, gathered = _steps(step, (own, gathered), ring)
    return jnp.concatenate(gathered, axis=1)


def _steps(step: Any, carry: Any, ring: Ring) -> Any:
    """Run the N - 1 steps of a phase."""
    count = ring.size - 1
    return lax.scan(step, carry, jnp.arange(count), unroll=count if ring.unrolled else 1)[0]


def _send(x: Array, to: DirectedSlice, ring: Ring) -> Array:
    pairs = [(r, (r + to.direction) % ring.size) for r in range(ring.size)]
    return lax.ppermute(x, ring.axis, pairs)


def _chunk(parts: Array, rank: Array, hops: Any, ring: Ring) -> Array:
    return lax.dynamic_index_in_dim(parts, _rank_after(rank, hops, ring), 0, keepdims=False)


def _rank_after(rank: Array, hops: Any, ring: Ring) -> Array:
    """The rank `hops` further along the ring."""
    return jnp.mod(rank + hops, ring.size)
