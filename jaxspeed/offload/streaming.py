"""Streaming loops over arrays in host memory: fetch a slice, compute, write back.

The loop carries the host arrays, and the compiler updates them in place. Being a loop, it has no
two slices on the device at once. (XLA's scheduler hoists transfers outside of loops, ten and more
of them, through barriers too: seen with libtpu for v5p, jax 0.10.2.)
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.offload.update_device import ON_DEVICE, UpdateDevice
from jaxspeed.placement.memory_kinds import on_device, to_device, to_host
from jaxspeed.placement.specs import num_shards
from jaxspeed.traced_loss.accumulate import Share, running_mean

Arrays = dict[str, Any]

# TPUs store the last two dims of an array in tiles of up to 16 x 128, by the dtype, and write only
# full tiles to host memory (libtpu 0.0.51 compiles nothing else). {dim from the last: tile size}.
_TILES = {0: 128, 1: 16}

# Slices of an array that is not small. XLA:TPU fetches the first one before the loop and dissolves
# the loop that is left of two, so that the transfers of all parameters would be in flight at once.
FEWEST = 4


@dataclass(frozen=True)
class StreamedArray:
    """Shape and sharding of one array of a parameter."""

    shape: tuple[int, ...]  # padded where it is sharded
    at: NamedSharding

    def entry(self, dim: int) -> Any:
        return self.at.spec[dim] if dim < len(self.at.spec) else None


@dataclass(frozen=True)
class StreamPlan:
    """Slices along one dim, each with `rows` rows of each of its `num_shards` shards."""

    dim: int
    num_shards: int
    size: int  # rows of a shard
    rows: int  # ... of a shard in a slice

    @property
    def count(self) -> int:
        """Number of full slices."""
        return self.size // self.rows

    def slice_shape(self, shape: tuple[int, ...], rows: int | None = None) -> tuple[int, ...]:
        """Shape of a slice of an array of this shape; full, or with so many rows per shard."""
        rows = self.rows if rows is None else rows
        return (*shape[: self.dim], self.num_shards * rows, *shape[self.dim + 1 :])

    def positions(self, start: Any, rows: int) -> jax.Array:
        """[num_shards x rows], the indices along the dim of a slice's rows."""
        first = jnp.arange(self.num_shards)[:, None] * self.size
        return (first + start + jnp.arange(rows)).reshape(-1)

    def fetch(
        self, x: jax.Array, layout: StreamedArray, start: Any, rows: int, cores: UpdateDevice
    ) -> jax.Array:
        """A slice, in the memory of `cores`.

        With one shard, or of a full array, without a reshape: XLA:GPU and XLA:TPU do not always
        reshape an array in host memory.
        """
        if self.num_shards == 1 or rows == self.size:
            if rows < self.size:
                x = jax.lax.dynamic_slice_in_dim(x, start, rows, self.dim)
            return cores.fetch(x, layout.at)
        split = x.reshape(self._split_shape(layout.shape, self.size))
        part = jax.lax.dynamic_slice_in_dim(split, start, rows, self.dim + 1)
        part = cores.fetch(part, self._sharding(layout))
        return part.reshape(*layout.shape[: self.dim], -1, *layout.shape[self.dim + 1 :])

    def write(
        self, x: jax.Array, layout: StreamedArray, start: Any, part: jax.Array, cores: UpdateDevice
    ) -> jax.Array:
        """Write a slice computed by `cores` back into the array."""
        if self.num_shards == 1 or part.shape == x.shape:
            part = cores.store(part, layout.at)
            if part.shape == x.shape:
                return part
            return jax.lax.dynamic_update_slice_in_dim(x, part, start, self.dim)
        split = x.reshape(self._split_shape(layout.shape, self.size))
        part = part.reshape(self._split_shape(part.shape, part.shape[self.dim] // self.num_shards))
        part = cores.store(part, self._sharding(layout))
        written = jax.lax.dynamic_update_slice_in_dim(split, part, start, self.dim + 1)
        return written.reshape(layout.shape)

    def _split_shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        return (*shape[: self.dim], self.num_shards, rows, *shape[self.dim + 1 :])

    def _sharding(self, layout: StreamedArray) -> NamedSharding:
        """Sharding of [.., num_shards, rows, ..]."""
        entries = [layout.entry(dim) for dim in range(len(layout.shape))]
        entries.insert(self.dim + 1, None)
        return NamedSharding(
            layout.at.mesh, PartitionSpec(*entries), memory_kind=layout.at.memory_kind
        )


def choose_stream_plan(
    layouts: Mapping[str, StreamedArray],
    sharded: StreamedArray,
    dims: Iterable[int],
    most: int,
    *,
    even: bool = False,
) -> StreamPlan | None:
    """Slices of at most `most` elements per device, along the first dim that allows it.

    Args:
      layouts: the arrays that are streamed together.
      sharded: the array whose sharding determines the shards of a dim.
      dims: the dims along which the arrays may be sliced.
      most: elements of one array that a device should hold at once.
      even: whether all slices must have the same size.

    Returns:
      None where no dim has the same size and compatible shards in all arrays.
    """
    sizes = sharded.at.mesh.shape
    tiled = sharded.at.mesh.devices.flat[0].platform == "tpu"
    per_device = math.prod(sharded.at.shard_shape(sharded.shape))
    best: tuple[int, StreamPlan] | None = None
    for dim in dims:
        if len({layout.shape[dim] for layout in layouts.values()}) > 1:
            continue
        shards = num_shards(sharded.entry(dim), sizes)
        if any(shards % num_shards(layout.entry(dim), sizes) for layout in layouts.values()):
            continue
        size = sharded.shape[dim] // shards
        if not size:
            continue
        row = max(1, per_device // size)
        rows = min(size, max(1, most // row))
        if rows == size > 1 and 8 * row * size > most:
            rows = -(-size // FEWEST)
            rows = next((n for n in range(rows, rows // 2, -1) if size % n == 0), rows)
        if even:
            rows = max(n for n in range(1, rows + 1) if size % n == 0)
        if tiled and rows < size:
            tile = _TILES.get(len(sharded.shape) - 1 - dim, 1)
            if size % tile or rows < tile:
                continue
            # XLA stores an array with a short last dim with the dim before it minor.
            rows -= rows % (128 if rows >= 128 and size % 128 == 0 else tile)
        if best is None or rows * row < best[0]:
            best = rows * row, StreamPlan(dim, shards, size, rows)
        if best[0] <= most:
            break
    return best[1] if best else None


def stream(
    plan: StreamPlan,
    layouts: Mapping[str, StreamedArray],
    read: Arrays,
    carried: Arrays,
    compute: Callable[[Arrays, Any, int], Arrays],
    cores: UpdateDevice = ON_DEVICE,
    unread: Collection[str] = (),
) -> Arrays:
    """The carried arrays after `compute(slices, start, rows)` has replaced each of their slices.

    The slices are in the memory of `cores`; those of `unread` arrays are not passed.
    """

    def step(start: Any, rows: int, carried: Arrays) -> Arrays:
        wanted = {n: x for n, x in (read | carried).items() if n not in unread}
        slices = {n: plan.fetch(x, layouts[n], start, rows, cores) for n, x in wanted.items()}
        computed = compute(slices, start, rows)
        return {n: plan.write(x, layouts[n], start, computed[n], cores) for n, x in carried.items()}

    def body(i: Any, carried: Arrays) -> Arrays:
        return step(i * plan.rows, plan.rows, carried)

    if plan.count == 1:
        carried = step(0, plan.rows, carried)
    else:
        carried = jax.lax.fori_loop(0, plan.count, body, carried)
    left = plan.size - plan.count * plan.rows
    return step(plan.count * plan.rows, left, carried) if left else carried


def total(
    plan: StreamPlan,
    layout: StreamedArray,
    x: jax.Array,
    of: Callable[[jax.Array], jax.Array],
    seen: jax.Array,
    cores: UpdateDevice = ON_DEVICE,
) -> jax.Array:
    """`seen` plus the sum of `of(slice)` over the slices of one array, computed on `cores`."""

    def add(i: Any, seen: jax.Array) -> jax.Array:
        return plus(seen, i * plan.rows, plan.rows)

    def plus(seen: jax.Array, start: Any, rows: int) -> jax.Array:
        return seen + on_device(cores.compute(of)(plan.fetch(x, layout, start, rows, cores)))

    summed = add(0, seen) if plan.count == 1 else jax.lax.fori_loop(0, plan.count, add, seen)
    left = plan.size - plan.count * plan.rows
    return plus(summed, plan.count * plan.rows, left) if left else summed


# -- gradients that accumulate in host memory ------------------------------------------------------

SEEN, NEW = "seen", "new"
SLICE_ELEMENTS = 1 << 25  # per device, in device memory at once


def zeros_in_host(layout: StreamedArray, dtype: Any, layers: bool) -> jax.Array:
    """Zeros in host memory; of a stack of `layers` the device holds at most one at a time."""
    if not layers or layout.entry(0) is not None or layout.shape[0] == 1:
        return to_host(jnp.zeros(layout.shape, dtype), layout.at)

    def one(carry: None, _: None) -> tuple[None, jax.Array]:
        return None, jax.device_put(jnp.zeros(layout.shape[1:], dtype), jax.memory.Space.Host)

    return jax.lax.scan(one, None, length=layout.shape[0])[1]


def mean_in_host(seen: jax.Array, new: jax.Array, layout: StreamedArray, share: Share) -> jax.Array:
    """`running_mean` of arrays in host memory of the same sharding."""
    layouts = {SEEN: layout, NEW: layout}
    most = min(
        SLICE_ELEMENTS,
        max(1, math.prod(layout.at.shard_shape(layout.shape)) // max(layout.shape[0], 1)),
    )
    plan = (
        choose_stream_plan(layouts, layout, range(len(layout.shape)), most)
        if layout.shape
        else None
    )
    if plan is None:
        mean = running_mean(to_device(seen, layout.at), to_device(new, layout.at), share)
        return to_host(mean, layout.at)

    def compute(slices: dict[str, Any], start: Any, rows: int) -> dict[str, Any]:
        return {SEEN: running_mean(slices[SEEN], slices[NEW], share)}

    return stream(plan, layouts, {NEW: new}, {SEEN: seen}, compute)[SEEN]
