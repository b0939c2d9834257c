"""Collective matmul: matmuls overlapped with the steps of a ring all-gather or reduce-scatter.

With activations sharded along the sequence over the T devices of an axis, a block needs

    columns   y_i = all_gather(x) . W_i         W_i and y_i sharded on a free dim
    row       y   = reduce_scatter(h . W)       contracted dim sharded, y along the sequence

Here each is T matmuls of one chunk of the sequence. In a *gather ring* a chunk is sent to the next
device while it is multiplied; in a *scatter ring* an accumulator is sent, while the matmul that is
added to it on arrival is computed. (Collective matmul: Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.) Each is the
other's transpose: its backward pass with respect to x and h.

The functions are global views, manual over the ring's axis only. They save their inputs for the
backward pass: x sharded along the sequence, never gathered. A weight's gradient is one matmul with
the gathered array, outside the ring: computed chunk by chunk, its reduction over the data axes
would be communicated T times. The rings also gather what it needs: dy is in the gather ring anyway,
and x is sent against the accumulator, in the links' other direction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import TENSOR


@dataclass(frozen=True)
class RingMatmul:
    """One matmul of an activation and a weight, y = bind(x, w), and its sharded dims.

    Attributes:
      bind: the matmul, linear in each argument, for a sequence of any length.
      x_seq: the sequence dim of x.
      y_seq: the sequence dim of y.
      w_sharded: the sharded dim of w.
      x_sharded: of a row matmul, the contracted dim of x, which is sharded.
      y_sharded: of a column matmul, the sharded dim of y.
    """

    bind: Callable[[Array, Array], Array]
    x_seq: int
    y_seq: int
    w_sharded: int
    x_sharded: int | None
    y_sharded: int | None


def ring_columns(
    x: Array,
    weights: Sequence[Array],
    matmuls: Sequence[RingMatmul],
    *,
    axis: str = TENSOR,
    bidirectional: bool = False,
) -> list[Array]:
    """y_i = x . W_i for weights sharded on a free dim; x is gathered around the ring.

    Args:
      x: sharded along its sequence dim over `axis`; the chunk of a device is multiplied with all
        weights while it is sent.
      weights: one per matmul, sharded on `w_sharded`.
      matmuls: of x and each weight; all have the same `x_seq`.
      axis: the mesh axis of the ring, in the mesh of the trace's context. Other axes may be
        automatic or manual.
      bidirectional: send half of each chunk in each direction, to use both directions of a link;
        the chunk must be even.

    Returns:
      y_i, unsharded along the sequence and sharded on `y_sharded`.

    The gradient of x is summed over the matmuls on each device, then around the ring, in the
    dtype of x and the order of `ring_row`.
    """
    (x_seq,) = {matmul.x_seq for matmul in matmuls}
    _check_length(x.shape[x_seq], axis, bidirectional)
    return _columns(tuple(matmuls), _Ring(axis, bidirectional), x, list(weights))


def ring_row(
    h: Array,
    weight: Array,
    matmul: RingMatmul,
    *,
    axis: str = TENSOR,
    bidirectional: bool = False,
) -> Array:
    """y = h . W with the contracted dim sharded; y is reduce-scattered around the ring.

    Args:
      h: sharded on `x_sharded` over `axis`, unsharded along the sequence.
      weight: sharded on `w_sharded`.
      matmul: of h and the weight.
      axis: as in `ring_columns`.
      bidirectional: as in `ring_columns`.

    Returns:
      y, sharded along the sequence. The chunk of device r is summed in the order r + 1, r + 2, ...,
      r (r - 1, r - 2, ... for the half in the other direction), in the dtype of the matmul: bf16 is
      rounded at each of the T - 1 sums, as in a bf16 reduce-scatter. To sum and send fp32, set the
      matmul's `preferred_element_type`.
    """
    _check_length(h.shape[matmul.x_seq], axis, bidirectional)
    return _row(matmul, _Ring(axis, bidirectional), h, weight)


class _Ring(NamedTuple):
    axis: str
    bidirectional: bool
    rank: Any = None  # of the device, in per-device code

    @property
    def size(self) -> int:
        return jax.sharding.get_abstract_mesh().shape[self.axis]


def _check_length(length: int, axis: str, bidirectional: bool) -> None:
    size = _Ring(axis, bidirectional).size
    parts = 2 * size if bidirectional else size
    if length % parts:
        raise ValueError(
            f"a sequence of {length} cannot be split into {parts} equal chunks for a ring of "
            f"{size} devices{' in both directions' if bidirectional else ''}"
        )


# -- the global view and its derivative -----------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _columns(
    matmuls: tuple[RingMatmul, ...], ring: _Ring, x: Array, weights: list[Array]
) -> list[Array]:
    x_seq = matmuls[0].x_seq

    def of_device(ring: _Ring, chunk: Array, weights: list[Array]) -> list[Array]:
        multiply = [functools.partial(_times, p, w) for p, w in zip(matmuls, weights)]
        return _gather_ring(chunk, x_seq, multiply, [p.y_seq for p in matmuls], ring)

    ys = [jax.eval_shape(p.bind, x, w) for p, w in zip(matmuls, weights)]
    return _on_ring(
        of_device,
        ring,
        (_sharded(x, x_seq, ring), _weight_specs(matmuls, weights, ring)),
        [_sharded(y, p.y_sharded, ring) for p, y in zip(matmuls, ys)],
    )(x, weights)


def _columns_forward(
    matmuls: tuple[RingMatmul, ...], ring: _Ring, x: Array, weights: list[Array]
) -> tuple[list[Array], tuple[Array, list[Array]]]:
    return _columns(matmuls, ring, x, weights), (x, weights)


def _columns_backward(
    matmuls: tuple[RingMatmul, ...],
    ring: _Ring,
    saved: tuple[Array, list[Array]],
    dys: list[Array],
) -> tuple[Array, list[Array]]:
    x, weights = saved
    x_seq = matmuls[0].x_seq

    def of_device(
        ring: _Ring, chunk: Array, dys: list[Array], weights: list[Array]
    ) -> tuple[Array, Array]:
        def sum_of_matmuls(start: Array, length: int) -> Array:
            like = _resized(chunk, {x_seq: length})
            parts = (
                _wrt_x(p, like, w, _part(dy, start, length, p.y_seq))
                for p, w, dy in zip(matmuls, weights, dys)
            )
            return functools.reduce(jnp.add, parts)

        # Without the barrier XLA saves the gathered x in the forward pass: in four unrolled blocks
        # 105 MB of temporaries instead of 67 (TPU, jax 0.12.0.1).
        chunk, dys = lax.optimization_barrier((chunk, dys))
        (full,) = _gather_ring(chunk, x_seq, [_identity], [x_seq], ring, direction=-1)
        return _scatter_ring(sum_of_matmuls, full.shape[x_seq], x_seq, ring), full

    dx, x = _on_ring(
        of_device,
        ring,
        (
            _sharded(x, x_seq, ring),
            [_sharded(dy, p.y_sharded, ring) for p, dy in zip(matmuls, dys)],
            _weight_specs(matmuls, weights, ring),
        ),
        (_sharded(x, x_seq, ring), P()),
    )(x, dys, weights)
    return dx, [_wrt_w(p, x, w, dy) for p, w, dy in zip(matmuls, weights, dys)]


_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row(matmul: RingMatmul, ring: _Ring, h: Array, weight: Array) -> Array:
    def of_device(ring: _Ring, h: Array, weight: Array) -> Array:
        def multiply(start: Array, length: int) -> Array:
            return matmul.bind(_part(h, start, length, matmul.x_seq), weight)

        return _scatter_ring(multiply, h.shape[matmul.x_seq], matmul.y_seq, ring)

    y = jax.eval_shape(matmul.bind, h, weight)
    return _on_ring(
        of_device,
        ring,
        (_sharded(h, matmul.x_sharded, ring), _sharded(weight, matmul.w_sharded, ring)),
        _sharded(y, matmul.y_seq, ring),
    )(h, weight)


def _row_forward(
    matmul: RingMatmul, ring: _Ring, h: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _row(matmul, ring, h, weight), (h, weight)


def _row_backward(
    matmul: RingMatmul, ring: _Ring, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    h, weight = saved
    assert matmul.x_sharded is not None
    shard_sizes = {matmul.x_sharded: h.shape[matmul.x_sharded] // ring.size}

    def of_device(ring: _Ring, dy: Array, weight: Array) -> list[Array]:
        def multiply(part: Array) -> Array:
            like = _resized(h, {**shard_sizes, matmul.x_seq: part.shape[matmul.y_seq]})
            return _wrt_x(matmul, like, weight, part)

        seqs = [matmul.x_seq, matmul.y_seq]
        return _gather_ring(dy, matmul.y_seq, [multiply, _identity], seqs, ring)

    dh, dy = _on_ring(
        of_device,
        ring,
        (_sharded(dy, matmul.y_seq, ring), _sharded(weight, matmul.w_sharded, ring)),
        [_sharded(h, matmul.x_sharded, ring), P()],
    )(dy, weight)
    return dh, _wrt_w(matmul, h, weight, dy)


_row.defvjp(_row_forward, _row_backward)


def _times(matmul: RingMatmul, w: Array, x: Array) -> Array:
    return matmul.bind(x, w)


def _identity(x: Array) -> Array:
    return x


def _wrt_x(matmul: RingMatmul, like: Any, w: Array, dy: Array) -> Array:
    """The gradient of x, which has the shape and dtype of `like`."""
    (dx,) = jax.linear_transpose(lambda x: matmul.bind(x, w), like)(dy)
    return dx


def _wrt_w(matmul: RingMatmul, x: Array, w: Array, dy: Array) -> Array:
    (dw,) = jax.linear_transpose(lambda w: matmul.bind(x, w), w)(dy)
    return dw


# -- per-device code ------------------------------------------------------------------------------


class _SubChunk(NamedTuple):
    """The part of every chunk that is sent in one direction."""

    direction: int  # 1: from device r to r + 1
    start: int  # in the chunk
    length: int


def _subchunks(length: int, ring: _Ring, direction: int = 1) -> list[_SubChunk]:
    if not ring.bidirectional:
        return [_SubChunk(direction, 0, length)]
    half = length // 2
    return [_SubChunk(direction, 0, half), _SubChunk(-direction, half, half)]


def _gather_ring(
    chunk: Array,
    seq: int,
    multiply: Sequence[Callable[[Array], Array]],
    seqs: Sequence[int],
    ring: _Ring,
    direction: int = 1,
) -> list[Array]:
    """[m(x) for m in multiply], where x is all devices' chunks along its dim `seq`.

    At step s device r multiplies the chunk of device r - s while it sends it to r + 1. The
    sequence is dim seqs[i] of result i.
    """
    length = chunk.shape[seq]
    subchunks = _subchunks(length, ring, direction)
    held = [lax.slice_in_dim(chunk, a.start, a.start + a.length, axis=seq) for a in subchunks]
    results: list[Array] = []
    for step in range(ring.size):
        last = step == ring.size - 1
        arriving = held if last else [_send(x, a, ring) for x, a in zip(held, subchunks)]
        for subchunk, part in zip(subchunks, held):
            start = _neighbour(-subchunk.direction * step, ring) * length + subchunk.start
            parts = [m(part) for m in multiply]
            if not results:
                full = [_resized(y, {d: ring.size * length}) for y, d in zip(parts, seqs)]
                results = [jnp.zeros(y.shape, y.dtype) for y in full]
            results = [
                lax.dynamic_update_slice_in_dim(y, part, start, dim)
                for y, part, dim in zip(results, parts, seqs)
            ]
        # Step by step: otherwise XLA sends all chunks first (TPU, jax 0.11.2, 0.12.0.1). No time is
        # lost: a chunk that arrived earlier could not be sent on before it is multiplied.
        held, results = lax.optimization_barrier((arriving, results))
    return results


def _scatter_ring(
    multiply: Callable[[Array, int], Array], positions: int, seq: int, ring: _Ring
) -> Array:
    """This device's chunk of the sum over devices of the matmuls of all `positions`.

    `multiply(start, length)` is this device's matmul of one part of the sequence, which is dim
    `seq` of the result. At step s device r adds the one of the chunk of device r + T - 1 - s to the
    accumulator, which reaches that device after the last step.
    """
    length = positions // ring.size
    subchunks = _subchunks(length, ring)
    sums: list[Array] = []
    for step in range(ring.size):
        hops = ring.size - 1 - step
        parts = [
            multiply(
                _neighbour(subchunk.direction * hops, ring) * length + subchunk.start,
                subchunk.length,
            )
            for subchunk in subchunks
        ]
        arrived = [_send(x, subchunk, ring) for x, subchunk in zip(sums, subchunks)]
        sums = [_added(x, part) for x, part in zip(arrived, parts)] if arrived else parts
    return sums[0] if len(sums) == 1 else lax.concatenate(sums, seq)


def _added(arrived: Array, part: Array) -> Array:
    """Their sum, behind a barrier.

    Without it XLA fuses the matmul with the sum, on TPU and GPU, so that the matmul starts only
    after the accumulator has arrived (seen for TPUs with jax 0.11.2 and 0.12.0.1).
    """
    arrived, part = lax.optimization_barrier((arrived, part))
    return arrived + part


def _send(x: Array, subchunk: _SubChunk, ring: _Ring) -> Array:
    pairs = [(r, (r + subchunk.direction) % ring.size) for r in range(ring.size)]
    return lax.ppermute(x, ring.axis, pairs)


def _neighbour(hops: int, ring: _Ring) -> Array:
    """The rank `hops` further along the ring; `rem` of at least 0, so that no sign needs fixing."""
    return lax.rem(ring.rank + hops % ring.size, ring.size)


def _part(x: Array, start: Array, length: int, dim: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, length, dim)


# -- shapes and specs -----------------------------------------------------------------------------


def _on_ring(
    of_device: Callable[..., Any], ring: _Ring, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`of_device(ring with the device's rank, *arguments)` on each device."""
    return jax.shard_map(
        lambda *args: of_device(ring._replace(rank=lax.axis_index(ring.axis)), *args),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={ring.axis},
        check_vma=False,  # never differentiated; gathered results are replicated
    )


def _sharded(x: Any, dim: int | None, ring: _Ring) -> P:
    """The spec of x sharded over the ring on dim `dim`."""
    assert dim is not None
    return P(*(ring.axis if d == dim else None for d in range(x.ndim)))


def _weight_specs(matmuls: Sequence[RingMatmul], weights: Sequence[Array], ring: _Ring) -> list[P]:
    return [_sharded(w, p.w_sharded, ring) for p, w in zip(matmuls, weights)]


def _resized(x: Any, lengths: dict[int, int]) -> jax.ShapeDtypeStruct:
    shape = tuple(lengths.get(dim, size) for dim, size in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)
