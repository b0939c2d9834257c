"""What is written must not change while it is written: the next step uses its state up."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.checkpoint.leaves import Arrays, kept_arrays, kept_leaves, key_data
from jaxspeed.objective.train_state import TrainState
from jaxspeed.placement.memory_kinds import on_device
from jaxspeed.placement.specs import by_dim, entry_axes, num_shards, spec_axes
from jaxspeed.train.program import Program

_WORTH_SPREADING = 1 << 20  # bytes


class Snapshot(NamedTuple):
    """A state's arrays as they are kept."""

    arrays: Arrays
    is_own: bool  # whether the state may be used up at once, or only once they are on the host


def snapshotter(program: Program) -> Callable[[TrainState], Snapshot]:
    """A function from a state to arrays that stay as they are.

    Where arrays already lie in host memory, NumPy sees them in place, so they are copied; each
    device copies its part of what several hold. From other memories Orbax copies to the host
    before its save returns.
    """
    leaves = kept_leaves(program)
    on_host = program.mesh.devices.flat[0].platform == "cpu"

    def copied(arrays: Arrays) -> Arrays:
        return {name: jnp.copy(on_device(key_data(x))) for name, x in arrays.items()}

    at = {name: leaf.stored.sharding for name, leaf in leaves.items()}
    if on_host:
        at = {
            name: _spread(leaf.stored, at[name]) if leaf.nbytes >= _WORTH_SPREADING else at[name]
            for name, leaf in leaves.items()
        }
    moved = [
        name
        for name, leaf in leaves.items()
        if on_host or leaf.key or "host" in str(leaf.stored.sharding.memory_kind)
    ]
    copy = jax.jit(copied, out_shardings={name: at[name] for name in moved})

    def snapshot(state: TrainState) -> Snapshot:
        arrays = kept_arrays(program, state)
        copies = jax.block_until_ready(copy({name: arrays[name] for name in moved}))
        return Snapshot({**arrays, **copies}, is_own=on_host)

    return snapshot


def _spread(leaf: jax.ShapeDtypeStruct, at: NamedSharding) -> NamedSharding:
    """Cut over the axes that hold copies as well, where a dim divides."""
    mesh = at.mesh
    spec, used = by_dim(at.spec, len(leaf.shape)), spec_axes(at.spec)
    free = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in used)
    copies = math.prod(mesh.shape[axis] for axis in free)
    for dim, entry in enumerate(spec):
        if copies > 1 and leaf.shape[dim] % (num_shards(entry, mesh.shape) * copies) == 0:
            spec[dim] = (*entry_axes(entry), *free)
            return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=at.memory_kind)
    return at
