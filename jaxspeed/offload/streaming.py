"""Streaming loops over arrays in host memory: fetch a slice, compute, write back.

A walk is a loop whose body slices host arrays, moves the slices to the device, and writes what was
made of them back to where they lay: the loop carries the host arrays, and the compiler updates them
in place. That no two pieces are on the device at once follows from its being a loop. (Moves outside
of loops are put ahead by XLA's scheduler, ten and more of them, through barriers too: seen with
libtpu for v5p, jax 0.10.2.)
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.objective.accumulate import running_mean
from jaxspeed.offload.update_device import OF_DEVICE, UpdateDevice
from jaxspeed.placement.memory_kinds import on_device, to_device, to_host
from jaxspeed.placement.specs import num_shards

Arrays = dict[str, Any]

# TPUs keep the last two dims of an array in tiles, and write to host memory whole ones (libtpu
# 0.0.51 compiles nothing else): of up to 16 x 128, by the dtype. By the dim, counted from the last.
_TILES = {0: 128, 1: 16}


@dataclass(frozen=True)
class StreamedArray:
    """How one array of a parameter is stored."""

    shape: tuple[int, ...]  # padded where it is cut
    at: NamedSharding

    def entry(self, dim: int) -> Any:
        return self.at.spec[dim] if dim < len(self.at.spec) else None


@dataclass(frozen=True)
class StreamPlan:
    """Pieces along one dim, each of `rows` from every one of the `parts` into which it is cut."""

    dim: int
    parts: int
    size: int  # rows of a part
    rows: int  # ... of a piece

    @property
    def count(self) -> int:
        """Of whole pieces."""
        return self.size // self.rows

    def piece_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a whole piece of an array of this shape."""
        return self.part_shape(shape, self.rows)

    def part_shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Of a piece with so many rows of each part."""
        return (*shape[: self.dim], self.parts * rows, *shape[self.dim + 1 :])

    def positions(self, start: Any, rows: int) -> jax.Array:
        """[parts x rows], where the rows of a piece lie along the dim."""
        first = jnp.arange(self.parts)[:, None] * self.size
        return (first + start + jnp.arange(rows)).reshape(-1)

    def fetch(
        self, x: jax.Array, lane: StreamedArray, start: Any, rows: int, cores: UpdateDevice
    ) -> jax.Array:
        """A piece, where these cores read it.

        What is cut in one part is sliced as it is, and a whole array is brought as it is: XLA:GPU
        and XLA:TPU do not always reshape an array in host memory.
        """
        if self.parts == 1 or rows == self.size:
            if rows < self.size:
                x = jax.lax.dynamic_slice_in_dim(x, start, rows, self.dim)
            return cores.brought(x, lane.at)
        opened = x.reshape(self._opened(lane.shape, self.size))
        piece = jax.lax.dynamic_slice_in_dim(opened, start, rows, self.dim + 1)
        piece = cores.brought(piece, self._sharding(lane))
        return piece.reshape(*lane.shape[: self.dim], -1, *lane.shape[self.dim + 1 :])

    def write(
        self, x: jax.Array, lane: StreamedArray, start: Any, piece: jax.Array, cores: UpdateDevice
    ) -> jax.Array:
        """The array with a piece of it replaced by what these cores made."""
        if self.parts == 1 or piece.shape == x.shape:
            piece = cores.put_back(piece, lane.at)
            if piece.shape == x.shape:
                return piece
            return jax.lax.dynamic_update_slice_in_dim(x, piece, start, self.dim)
        opened = x.reshape(self._opened(lane.shape, self.size))
        piece = piece.reshape(self._opened(piece.shape, piece.shape[self.dim] // self.parts))
        piece = cores.put_back(piece, self._sharding(lane))
        written = jax.lax.dynamic_update_slice_in_dim(opened, piece, start, self.dim + 1)
        return written.reshape(lane.shape)

    def _opened(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        return (*shape[: self.dim], self.parts, rows, *shape[self.dim + 1 :])

    def _sharding(self, lane: StreamedArray) -> NamedSharding:
        """Of [.., parts, rows, ..]."""
        entries = [lane.entry(dim) for dim in range(len(lane.shape))]
        entries.insert(self.dim + 1, None)
        return NamedSharding(lane.at.mesh, PartitionSpec(*entries), memory_kind=lane.at.memory_kind)


def choose_walk(
    lanes: Mapping[str, StreamedArray],
    cut: StreamedArray,
    dims: range,
    most: int,
    *,
    even: bool = False,
) -> StreamPlan | None:
    """The walk whose pieces have at most `most` elements a device, along the first dim that can.

    Args:
      lanes: the arrays that are walked together.
      cut: the one that says into how many parts a dim is cut.
      dims: along which it may go.
      most: elements of one array that a device should hold at once.
      even: whether all pieces have to be alike.

    Returns:
      None where no dim is stored alike by all lanes.
    """
    sizes = cut.at.mesh.shape
    tiled = cut.at.mesh.devices.flat[0].platform == "tpu"
    a_device = math.prod(cut.at.shard_shape(cut.shape))
    best: tuple[int, StreamPlan] | None = None
    for dim in dims:
        if len({lane.shape[dim] for lane in lanes.values()}) > 1:
            continue
        parts = num_shards(cut.entry(dim), sizes)
        if any(parts % num_shards(lane.entry(dim), sizes) for lane in lanes.values()):
            continue
        size = cut.shape[dim] // parts
        if not size:
            continue
        row = max(1, a_device // size)
        rows = min(size, max(1, most // row))
        if rows == size > 1 and 8 * row * size > most:
            rows = -(-size // 2)  # two pieces, so that it is a loop
        if even:
            rows = max(n for n in range(1, rows + 1) if size % n == 0)
        if tiled and rows < size:
            tile = _TILES.get(len(cut.shape) - 1 - dim, 1)
            if size % tile or rows < tile:
                continue
            rows -= rows % tile
        if best is None or rows * row < best[0]:
            best = rows * row, StreamPlan(dim, parts, size, rows)
        if best[0] <= most:
            break
    return best[1] if best else None


def stream(
    walk: StreamPlan,
    lanes: Mapping[str, StreamedArray],
    read: Arrays,
    carried: Arrays,
    compute: Callable[[Arrays, Any, int], Arrays],
    cores: UpdateDevice = OF_DEVICE,
    unread: Collection[str] = (),
) -> Arrays:
    """The carried arrays after `compute(pieces, start, rows)` has replaced each of their pieces.

    It is given the pieces where the cores read them, but for those of the `unread`.
    """

    def step(start: Any, rows: int, carried: Arrays) -> Arrays:
        wanted = {n: x for n, x in (read | carried).items() if n not in unread}
        pieces = {n: walk.fetch(x, lanes[n], start, rows, cores) for n, x in wanted.items()}
        made = compute(pieces, start, rows)
        return {n: walk.write(x, lanes[n], start, made[n], cores) for n, x in carried.items()}

    def body(i: Any, carried: Arrays) -> Arrays:
        return step(i * walk.rows, walk.rows, carried)

    if walk.count == 1:
        carried = step(0, walk.rows, carried)
    else:
        carried = jax.lax.fori_loop(0, walk.count, body, carried)
    left = walk.size - walk.count * walk.rows
    return step(walk.count * walk.rows, left, carried) if left else carried


def total(
    walk: StreamPlan,
    lane: StreamedArray,
    x: jax.Array,
    of: Callable[[jax.Array], jax.Array],
    seen: jax.Array,
    cores: UpdateDevice = OF_DEVICE,
) -> jax.Array:
    """`seen` and the sum of `of(piece)` over the pieces of one array, as the cores make it."""

    def add(i: Any, seen: jax.Array) -> jax.Array:
        return plus(seen, i * walk.rows, walk.rows)

    def plus(seen: jax.Array, start: Any, rows: int) -> jax.Array:
        return seen + on_device(cores.compute(of)(walk.fetch(x, lane, start, rows, cores)))

    summed = add(0, seen) if walk.count == 1 else jax.lax.fori_loop(0, walk.count, add, seen)
    left = walk.size - walk.count * walk.rows
    return plus(summed, walk.count * walk.rows, left) if left else summed


# -- gradients that accumulate in host memory ------------------------------------------------------

SEEN, NEW = "seen", "new"
PIECE = 1 << 25  # elements of a device that are on it at once


def zeros_in_host(lane: StreamedArray, dtype: Any, layers: bool) -> jax.Array:
    """Zeros in host memory; of those that stack `layers` the device never holds more than one."""
    if not layers or lane.entry(0) is not None or lane.shape[0] == 1:
        return to_host(jnp.zeros(lane.shape, dtype), lane.at)

    def one(carry: None, _: None) -> tuple[None, jax.Array]:
        return None, jax.device_put(jnp.zeros(lane.shape[1:], dtype), jax.memory.Space.Host)

    return jax.lax.scan(one, None, length=lane.shape[0])[1]


def mean_in_host(
    seen: jax.Array, new: jax.Array, lane: StreamedArray, share: jax.Array
) -> jax.Array:
    """`running_mean` of arrays in host memory that are sharded alike."""
    lanes = {SEEN: lane, NEW: lane}
    most = min(PIECE, max(1, math.prod(lane.at.shard_shape(lane.shape)) // max(lane.shape[0], 1)))
    walk = choose_walk(lanes, lane, range(len(lane.shape)), most) if lane.shape else None
    if walk is None:
        mean = running_mean(to_device(seen, lane.at), to_device(new, lane.at), share)
        return to_host(mean, lane.at)

    def compute(pieces: dict[str, Any], start: Any, rows: int) -> dict[str, Any]:
        return {SEEN: running_mean(pieces[SEEN], pieces[NEW], share)}

    return stream(walk, lanes, {NEW: new}, {SEEN: seen}, compute)[SEEN]
