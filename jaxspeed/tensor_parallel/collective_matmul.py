"""Collective matmul: products whose collective is a ring, overlapped step by step.

With activations cut along the sequence over the T devices of an axis, a block needs

    columns   y_i = all_gather(x) . W_i         W_i cut on a free dim, and so is y_i
    row       y   = reduce_scatter(h . W)       the contracted dim cut, y cut along the sequence

Here each is T products of one chunk of the sequence. In a *gather ring* the chunk travels on to the
next device while it is multiplied; in a *scatter ring* an accumulator does, while the product that
is added to it on arrival is computed. (Collective matmul: Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.) Each is the
other's transpose, and that is the backward pass with respect to x and h.

The functions are global views, manual over the ring's axis alone. What is saved for the backward
pass is what they were given: x cut along the sequence, never gathered. A weight's gradient is one
product with the gathered array, outside of the ring: taken a chunk at a time, its sum over the data
axes would be communicated T times. What it needs gathered goes round with the rest: dy is in the
gather ring already, and x goes round against the accumulator, on the links' other direction.
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


@dataclass(frozen=True)
class Product:
    """One product of an activation and a weight, y = bind(x, w), and which dims are cut.

    Attributes:
      bind: the product, linear in each argument, for a sequence of any length.
      x_seq: the sequence dim of x.
      y_seq: the sequence dim of y.
      w_cut: the dim of w that is cut over the axis.
      x_cut: the contracted dim of x that is cut, of a row product.
      y_cut: the dim of y that is cut, of a column product.
    """

    bind: Callable[[Array, Array], Array]
    x_seq: int
    y_seq: int
    w_cut: int
    x_cut: int | None
    y_cut: int | None


def ring_columns(
    x: Array,
    weights: Sequence[Array],
    products: Sequence[Product],
    *,
    axis: str = "tensor",
    both_ways: bool = False,
) -> list[Array]:
    """y_i = x . W_i for weights that are cut on a free dim, x being gathered around the ring.

    Args:
      x: cut along its sequence dim over `axis`; the chunk of a device is multiplied with all
        weights while it travels.
      weights: one for each product, cut on `w_cut`.
      products: what is computed of x and each weight; they agree on `x_seq`.
      axis: the mesh axis of the ring, in the mesh of the trace's context. The other axes stay as
        they are, automatic or manual.
      both_ways: half of each chunk goes round in each direction, so that both directions of a
        link are used; the chunk must be even.

    Returns:
      y_i, whole along the sequence and cut on `y_cut`.

    The gradient of x is summed over the products on each device, then around the ring, in the
    dtype of x and in the order that `ring_row` says.
    """
    (x_seq,) = {product.x_seq for product in products}
    _check_length(x.shape[x_seq], axis, both_ways)
    return _columns(tuple(products), _Ring(axis, both_ways), x, list(weights))


def ring_row(
    h: Array,
    weight: Array,
    product: Product,
    *,
    axis: str = "tensor",
    both_ways: bool = False,
) -> Array:
    """y = h . W with the contracted dim cut, y being reduced and scattered around the ring.

    Args:
      h: cut on `x_cut` over `axis`, whole along the sequence.
      weight: cut on `w_cut`.
      product: what is computed of them.
      axis: as for `ring_columns`.
      both_ways: as for `ring_columns`.

    Returns:
      y, cut along the sequence. Its chunk of device r is added up in the order r + 1, r + 2, ...,
      r (r - 1, r - 2, ... for the half that goes the other way), in the dtype of the product: one
      that gives bf16 is rounded at each of the T - 1 sums, as in a reduce-scatter of bf16. One that
      is to be summed in fp32 says so by its `preferred_element_type`, and then fp32 travels.
    """
    _check_length(h.shape[product.x_seq], axis, both_ways)
    return _row(product, _Ring(axis, both_ways), h, weight)


class _Ring(NamedTuple):
    axis: str
    both_ways: bool
    rank: Any = None  # of the device, in per-device code

    @property
    def size(self) -> int:
        return jax.sharding.get_abstract_mesh().shape[self.axis]


def _check_length(length: int, axis: str, both_ways: bool) -> None:
    size = _Ring(axis, both_ways).size
    parts = 2 * size if both_ways else size
    if length % parts:
        raise ValueError(
            f"a sequence of {length} does not make {parts} equal parts, for a ring of {size} "
            f"devices{' in both directions' if both_ways else ''}"
        )


# -- the global view and its derivative -----------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _columns(
    products: tuple[Product, ...], ring: _Ring, x: Array, weights: list[Array]
) -> list[Array]:
    x_seq = products[0].x_seq

    def of_device(ring: _Ring, chunk: Array, weights: list[Array]) -> list[Array]:
        multiply = [functools.partial(_times, p, w) for p, w in zip(products, weights)]
        return _gather_ring(chunk, x_seq, multiply, [p.y_seq for p in products], ring)

    ys = [jax.eval_shape(p.bind, x, w) for p, w in zip(products, weights)]
    return _on_ring(
        of_device,
        ring,
        (_cut(x, x_seq, ring), _weights_cut(products, weights, ring)),
        [_cut(y, p.y_cut, ring) for p, y in zip(products, ys)],
    )(x, weights)


def _columns_forward(
    products: tuple[Product, ...], ring: _Ring, x: Array, weights: list[Array]
) -> tuple[list[Array], tuple[Array, list[Array]]]:
    return _columns(products, ring, x, weights), (x, weights)


def _columns_backward(
    products: tuple[Product, ...],
    ring: _Ring,
    saved: tuple[Array, list[Array]],
    dys: list[Array],
) -> tuple[Array, list[Array]]:
    x, weights = saved
    x_seq = products[0].x_seq

    def of_device(
        ring: _Ring, chunk: Array, dys: list[Array], weights: list[Array]
    ) -> tuple[Array, Array]:
        def sum_of_products(start: Array, length: int) -> Array:
            like = _resized(chunk, {x_seq: length})
            parts = (
                _wrt_x(p, like, w, _part(dy, start, length, p.y_seq))
                for p, w, dy in zip(products, weights, dys)
            )
            return functools.reduce(jnp.add, parts)

        # Else XLA gathers x in the forward pass already, and keeps it (seen on TPU, jax 0.10.2).
        chunk, dys = lax.optimization_barrier((chunk, dys))
        (whole,) = _gather_ring(chunk, x_seq, [_itself], [x_seq], ring, direction=-1)
        return _scatter_ring(sum_of_products, whole.shape[x_seq], x_seq, ring), whole

    dx, x = _on_ring(
        of_device,
        ring,
        (
            _cut(x, x_seq, ring),
            [_cut(dy, p.y_cut, ring) for p, dy in zip(products, dys)],
            _weights_cut(products, weights, ring),
        ),
        (_cut(x, x_seq, ring), P()),
    )(x, dys, weights)
    return dx, [_wrt_w(p, x, w, dy) for p, w, dy in zip(products, weights, dys)]


_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row(product: Product, ring: _Ring, h: Array, weight: Array) -> Array:
    def of_device(ring: _Ring, h: Array, weight: Array) -> Array:
        def multiply(start: Array, length: int) -> Array:
            return product.bind(_part(h, start, length, product.x_seq), weight)

        return _scatter_ring(multiply, h.shape[product.x_seq], product.y_seq, ring)

    y = jax.eval_shape(product.bind, h, weight)
    return _on_ring(
        of_device,
        ring,
        (_cut(h, product.x_cut, ring), _cut(weight, product.w_cut, ring)),
        _cut(y, product.y_seq, ring),
    )(h, weight)


def _row_forward(
    product: Product, ring: _Ring, h: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _row(product, ring, h, weight), (h, weight)


def _row_backward(
    product: Product, ring: _Ring, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    h, weight = saved
    assert product.x_cut is not None
    own = {product.x_cut: h.shape[product.x_cut] // ring.size}

    def of_device(ring: _Ring, dy: Array, weight: Array) -> list[Array]:
        def multiply(part: Array) -> Array:
            like = _resized(h, {**own, product.x_seq: part.shape[product.y_seq]})
            return _wrt_x(product, like, weight, part)

        seqs = [product.x_seq, product.y_seq]
        return _gather_ring(dy, product.y_seq, [multiply, _itself], seqs, ring)

    dh, dy = _on_ring(
        of_device,
        ring,
        (_cut(dy, product.y_seq, ring), _cut(weight, product.w_cut, ring)),
        [_cut(h, product.x_cut, ring), P()],
    )(dy, weight)
    return dh, _wrt_w(product, h, weight, dy)


_row.defvjp(_row_forward, _row_backward)


def _times(product: Product, w: Array, x: Array) -> Array:
    return product.bind(x, w)


def _itself(x: Array) -> Array:
    return x


def _wrt_x(product: Product, like: Any, w: Array, dy: Array) -> Array:
    """The gradient of x, which has the shape and dtype of `like`."""
    (dx,) = jax.linear_transpose(lambda x: product.bind(x, w), like)(dy)
    return dx


def _wrt_w(product: Product, x: Array, w: Array, dy: Array) -> Array:
    (dw,) = jax.linear_transpose(lambda w: product.bind(x, w), w)(dy)
    return dw


# -- what each device does ------------------------------------------------------------------------


class _Lane(NamedTuple):
    """A part of every chunk that goes round in one direction."""

    direction: int  # 1: from device r to r + 1
    start: int  # in the chunk
    length: int


def _lanes(length: int, ring: _Ring, direction: int = 1) -> list[_Lane]:
    if not ring.both_ways:
        return [_Lane(direction, 0, length)]
    half = length // 2
    return [_Lane(direction, 0, half), _Lane(-direction, half, half)]


def _gather_ring(
    chunk: Array,
    seq: int,
    multiply: Sequence[Callable[[Array], Array]],
    seqs: Sequence[int],
    ring: _Ring,
    direction: int = 1,
) -> list[Array]:
    """[m(x) for m in multiply], x being the chunks of all devices along its dim `seq`.

    At step s device r multiplies the chunk of device r - s while it sends it to r + 1. The
    sequence is dim seqs[i] of the i-th result.
    """
    length = chunk.shape[seq]
    lanes = _lanes(length, ring, direction)
    held = [lax.slice_in_dim(chunk, a.start, a.start + a.length, axis=seq) for a in lanes]
    results: list[Array] = []
    for step in range(ring.size):
        last = step == ring.size - 1
        arriving = held if last else [_send(x, a, ring) for x, a in zip(held, lanes)]
        for lane, part in zip(lanes, held):
            start = _neighbour(-lane.direction * step, ring) * length + lane.start
            parts = [m(part) for m in multiply]
            if not results:
                whole = [_resized(y, {d: ring.size * length}) for y, d in zip(parts, seqs)]
                results = [jnp.zeros(y.shape, y.dtype) for y in whole]
            results = [
                lax.dynamic_update_slice_in_dim(y, part, start, dim)
                for y, part, dim in zip(results, parts, seqs)
            ]
        # Step by step, or XLA may send all chunks round first (seen on TPU, jax 0.10.2). It costs
        # no time: a chunk that came sooner could not be sent on sooner than it is multiplied.
        held, results = lax.optimization_barrier((arriving, results))
    return results


def _scatter_ring(
    multiply: Callable[[Array, int], Array], whole: int, seq: int, ring: _Ring
) -> Array:
    """This device's chunk of the sum over devices of the products of all `whole` positions.

    `multiply(start, length)` is this device's product of one part of the sequence, which is dim
    `seq` of it. At step s device r adds that of the chunk of device r + T - 1 - s to the
    accumulator, which reaches that device after the last step.
    """
    length = whole // ring.size
    lanes = _lanes(length, ring)
    sums: list[Array] = []
    for step in range(ring.size):
        hops = ring.size - 1 - step
        parts = [
            multiply(_neighbour(lane.direction * hops, ring) * length + lane.start, lane.length)
            for lane in lanes
        ]
        arrived = [_send(x, lane, ring) for x, lane in zip(sums, lanes)]
        sums = [_added(x, part) for x, part in zip(arrived, parts)] if arrived else parts
    return sums[0] if len(sums) == 1 else lax.concatenate(sums, seq)


def _added(arrived: Array, part: Array) -> Array:
    """Their sum. Without the barrier XLA fuses the product with the sum, on TPU and GPU, and then
    it starts no earlier than the accumulator arrives (seen with jax 0.10.2)."""
    arrived, part = lax.optimization_barrier((arrived, part))
    return arrived + part


def _send(x: Array, lane: _Lane, ring: _Ring) -> Array:
    pairs = [(r, (r + lane.direction) % ring.size) for r in range(ring.size)]
    return lax.ppermute(x, ring.axis, pairs)


def _neighbour(hops: int, ring: _Ring) -> Array:
    """The device so many hops further on; at least 0, so that no sign has to be mended."""
    return lax.rem(ring.rank + hops % ring.size, ring.size)


def _part(x: Array, start: Array, length: int, dim: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, length, dim)


# -- shapes and specs -----------------------------------------------------------------------------


def _on_ring(
    of_device: Callable[..., Any], ring: _Ring, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`of_device(ring with the device's rank, *arguments)` on each device.

    The rank comes in as an array. `lax.axis_index` is a PartitionId where other axes are automatic,
    and XLA refuses one that it moved out of the manual region (jax 0.10.2, CPU).
    """
    run = jax.shard_map(
        lambda rank, *args: of_device(ring._replace(rank=rank[0]), *args),
        in_specs=(P(ring.axis), *in_specs),
        out_specs=out_specs,
        axis_names={ring.axis},
        check_vma=False,  # no derivative is taken through it; what is gathered comes out replicated
    )
    return lambda *args: run(jnp.arange(ring.size), *args)


def _cut(x: Any, dim: int | None, ring: _Ring) -> P:
    """Dim `dim` of x over the ring."""
    assert dim is not None
    return P(*(ring.axis if d == dim else None for d in range(x.ndim)))


def _weights_cut(products: Sequence[Product], weights: Sequence[Array], ring: _Ring) -> list[P]:
    return [_cut(w, p.w_cut, ring) for p, w in zip(products, weights)]


def _resized(x: Any, lengths: dict[int, int]) -> jax.ShapeDtypeStruct:
    shape = tuple(lengths.get(dim, size) for dim, size in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)
