"""`DiskArray`: an array of a train state that is in buckets on a disk.

A bucket is a contiguous region of a file: rows of some arrays, one shard after another. All shards
that this process's devices have are in its file, once each.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxspeed.disk.direct_file import aligned
from jaxspeed.errors import DiskError


class DiskValues(Protocol):
    """What holds the values of arrays that are on a disk."""

    def read(self, name: str) -> jax.Array: ...
    def write(self, name: str, value: jax.Array) -> None: ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class DiskArray:
    """An array on a disk; in a pytree a node without leaves, which programs pass through.

    Its values are the newest that a step has written: a state that a step took has them too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding  # of what is read
    store: Callable[[], DiskValues | None]  # a weak reference

    def read(self) -> jax.Array:
        """The values, in the memory of `sharding`."""
        return self._values.read(self.name)

    def write(self, value: jax.Array) -> "DiskArray":
        """Replace the values, unless these are only traced; itself."""
        if not isinstance(value, jax.core.Tracer):
            self._values.write(self.name, value)
        return self

    @property
    def _values(self) -> DiskValues:
        if (values := self.store()) is None:
            raise DiskError(f"{self.name} was on a disk until its program was deleted")
        return values

    @property
    def shape_struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def __repr__(self) -> str:
        return f"DiskArray({self.name}, {list(self.shape)} {self.dtype})"


def is_on_disk(x: Any) -> bool:
    return isinstance(x, DiskArray)


def in_memory(tree: Any) -> Any:
    """The tree with the values of arrays that are on a disk."""
    return jax.tree.map(lambda x: x.read() if is_on_disk(x) else x, tree, is_leaf=is_on_disk)


def assembled(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    values: Sequence[np.ndarray],
    shards: Sequence["Shard"],
) -> jax.Array:
    """An array from the values of its shards."""
    on = {
        device: jax.device_put(x, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for x, shard in zip(values, shards, strict=True)
        for device in shard.devices
    }
    arrays = [on[device] for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@dataclass(frozen=True)
class ShardRows:
    """Rows `start` to `start + count` of each of the shards into which a dim is divided."""

    dim: int
    size: int  # of a shard
    start: int
    count: int

    def of(self, x: np.ndarray) -> np.ndarray:
        """A view of these rows of what a device has, with a dim for its shards."""
        shards = x.shape[self.dim] // self.size
        view = x.reshape(*x.shape[: self.dim], shards, self.size, *x.shape[self.dim + 1 :])
        index = (*[slice(None)] * (self.dim + 1), slice(self.start, self.start + self.count))
        return view[index]


class Shard(NamedTuple):
    """One shard of an array: where its bytes are in a bucket, and the devices that read them.

    Attributes:
      is_first: whether no process before this one has it too.
    """

    offset: int
    devices: Sequence[jax.Device]
    is_first: bool


@dataclass(frozen=True)
class BucketArray:
    """An array, or some of its rows, in a bucket."""

    name: str  # of the array
    shape: tuple[int, ...]  # of these rows
    dtype: Any
    sharding: NamedSharding
    rows: ShardRows | None  # None: all
    offset: int  # in the bucket

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape)

    @property
    def shard_bytes(self) -> int:
        return math.prod(self.shard_shape) * int(self.dtype.itemsize)

    @cached_property
    def shards(self) -> Sequence[Shard]:
        """The shards that this process's devices have."""
        by_index: dict[str, list[jax.Device]] = {}
        firsts: dict[str, int] = {}  # the first process that has a shard
        first: Any = self.sharding.mesh.devices.flat[0]
        process = first.process_index
        if self.sharding.addressable_devices:  # else devices to compile for
            process = jax.process_index()
        indices: Mapping[Any, Any] = self.sharding.devices_indices_map(self.shape)
        for device, index in indices.items():
            firsts.setdefault(str(index), device.process_index)
            if device.process_index == process:
                by_index.setdefault(str(index), []).append(device)
        step = aligned(self.shard_bytes)
        return [
            Shard(self.offset + i * step, devices, firsts[index] == process)
            for i, (index, devices) in enumerate(by_index.items())
        ]

    @cached_property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the array with all its rows."""
        shape = list(self.shape)
        if self.rows:
            shape[self.rows.dim] = shape[self.rows.dim] // self.rows.count * self.rows.size
        return tuple(shape)

    def regions(self, buffer: np.ndarray) -> Iterator[tuple[tuple[slice, ...], np.ndarray, Shard]]:
        """(where in the full array, the values there, their shard), of a buffer with the bucket."""
        at = self.sharding.devices_indices_map(self.full_shape)
        for view, shard in zip(self.views(buffer), self.shards, strict=True):
            index = at[shard.devices[0]]
            spans = [span.indices(n)[:2] for span, n in zip(index, self.full_shape)]
            if (rows := self.rows) is None:
                yield tuple(slice(*span) for span in spans), view, shard
                continue
            first = range(*spans[rows.dim], rows.size)
            for start, part in zip(first, np.split(view, len(first), rows.dim), strict=True):
                spans[rows.dim] = (start + rows.start, start + rows.start + rows.count)
                yield tuple(slice(*span) for span in spans), part, shard

    @property
    def nbytes(self) -> int:
        """Bytes in the file, with alignment."""
        return len(self.shards) * aligned(self.shard_bytes)

    def views(self, buffer: np.ndarray) -> list[np.ndarray]:
        """The shards in a buffer that holds the bucket, in the order of `shards`."""
        return [
            buffer[shard.offset : shard.offset + self.shard_bytes]
            .view(self.dtype)
            .reshape(self.shard_shape)
            for shard in self.shards
        ]

    def array(self, buffer: np.ndarray) -> jax.Array:
        """The rows as an array. On CPUs it is a view: the buffer has to stay as it is meanwhile."""
        return assembled(self.shape, self.sharding, self.views(buffer), self.shards)

    def store(self, value: jax.Array, buffer: np.ndarray, *, of_all: bool = False) -> None:
        """Copy the rows into a buffer, from an array of them or, with `of_all`, of all rows."""
        on = {shard.device: shard.data for shard in value.addressable_shards}
        for view, shard in zip(self.views(buffer), self.shards, strict=True):
            local = np.asarray(on[shard.devices[0]])
            if of_all and self.rows:
                local = self.rows.of(local)
                view = view.reshape(local.shape)
            np.copyto(view, local)


@dataclass(frozen=True)
class BucketPiece:
    """A parameter, or rows of it, that are updated with a bucket."""

    path: str
    rows: ShardRows | None
    arrays: Sequence[BucketArray]  # those that are on the disk
    roles: Sequence[str]  # what each is to the update


@dataclass(frozen=True)
class DiskBucket:
    """A contiguous region of the file."""

    offset: int
    nbytes: int
    pieces: Sequence[BucketPiece]

    def arrays(self, buffer: np.ndarray) -> list[dict[str, jax.Array]]:
        """The arrays of each piece by their roles, from a buffer that holds the bucket."""
        return [
            {role: x.array(buffer) for role, x in zip(piece.roles, piece.arrays, strict=True)}
            for piece in self.pieces
        ]

    def store(self, results: Sequence[dict[str, jax.Array]], buffer: np.ndarray) -> None:
        """Copy what `arrays` has become into the buffer."""
        for piece, values in zip(self.pieces, results, strict=True):
            for role, x in zip(piece.roles, piece.arrays, strict=True):
                x.store(values[role], buffer)
