"""Snapshot of a state before it is written, since the next step donates its buffers."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.checkpoint.leaves import Arrays, SavedLeaf, join, key_data, saved_arrays
from jaxspeed.disk.disk_array import DiskArray, in_memory, is_on_disk
from jaxspeed.placement.codec import Stored, parts_of
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.specs import by_dim, entry_axes, num_shards, spec_axes
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState

_SMALL_BYTES = 1 << 20


class Snapshot(NamedTuple):
    """The saved arrays of a state."""

    arrays: Arrays
    copied: bool  # the state may be donated at once, else only once the arrays are on the host
    on_disk: Mapping[str, DiskArray]  # those that are not copied


def snapshot_function(
    program: Program, leaves: Mapping[str, SavedLeaf]
) -> Callable[[TrainState, Mapping[str, Stored]], Snapshot]:
    """A function from a state, and other arrays by name, to copies that later steps do not change.

    Arrays in host memory are copied, since NumPy would see them in place. From other memories Orbax
    copies to the host before its save returns. Of replicated arrays each device copies a shard, and
    elsewhere of small ones too: Orbax would slice them, and each slice is a program to compile.
    """
    on_host = program.mesh.devices.flat[0].platform == "cpu"

    def copies_of(arrays: Arrays) -> Arrays:
        return {
            name: join(name, leaves[name], x)
            if isinstance(x, dict)
            else jnp.copy(on_device(key_data(x)))
            for name, x in arrays.items()
        }

    saved: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in leaves.items():
        saved |= parts_of(name, leaf.arrays)
    keys = {name for name, leaf in leaves.items() if leaf.key}
    stored = {name: x.sharding for name, x in saved.items()}
    at = {
        name: _spread(x, stored[name])
        if on_host or math.prod(x.shape) * x.dtype.itemsize < _SMALL_BYTES
        else stored[name]
        for name, x in saved.items()
    }
    moved = [
        name
        for name in saved
        if on_host
        or name in keys
        or (name in leaves and leaves[name].parts)
        or at[name] != stored[name]
        or "host" in str(at[name].memory_kind)
    ]
    moved = [name for name in moved if name not in program.storage.on_disk]
    copy = jax.jit(copies_of, out_shardings={name: at[name] for name in moved})

    def snapshot(state: TrainState, others: Mapping[str, Stored]) -> Snapshot:
        arrays: Arrays = {}
        values = {**saved_arrays(program, state), **others}
        for name, leaf in leaves.items():
            if leaf.parts:
                arrays[name] = in_memory({part: values[part] for part in leaf.parts})
            else:
                arrays |= parts_of(name, values[name])
        on_disk = {name: arrays.pop(name) for name in [*arrays] if is_on_disk(arrays[name])}
        copied = {name: arrays[name] for name in moved if name in arrays}
        copies = jax.block_until_ready(copy(copied))
        return Snapshot({**arrays, **copies}, on_host, on_disk)

    return snapshot


def _spread(leaf: jax.ShapeDtypeStruct, at: NamedSharding) -> NamedSharding:
    """Shard over the replicated axes as well, where a dim is divisible."""
    mesh = at.mesh
    spec, used = by_dim(at.spec, len(leaf.shape)), spec_axes(at.spec)
    free = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in used)
    copies = math.prod(mesh.shape[axis] for axis in free)
    for dim, entry in enumerate(spec):
        if copies > 1 and leaf.shape[dim] % (num_shards(entry, mesh.shape) * copies) == 0:
            spec[dim] = (*entry_axes(entry), *free)
            return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=at.memory_kind)
    return at
