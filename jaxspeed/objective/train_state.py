"""The train state: parameters, masters, optimizer state, variables; padding and state layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspeed.axes import product, storing_axes
from jaxspeed.optim import LossScale
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Placement, Row
from jaxspeed.placement.specs import as_entry, by_dim, num_shards, spec_axes
from jaxspeed.placement.table import PlacementTable

Arrays = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Train state as a pytree; parameters are flat dicts by path, as the table stores them."""

    step: Any  # int32 [], steps taken, skipped ones included
    skipped: Any  # int32 [], steps whose update was not finite
    params: Arrays  # the `param` rows
    master: Arrays  # the `master` rows
    opt: Any  # the optimizer's own state
    ema: Arrays  # the moving average of the trained parameters, if configured
    variables: Arrays  # statistics, random streams, buffers
    loss_scale: LossScale
    # Error feedback of quantized ring messages, per device: added to the next message.
    ring_errors: Arrays = field(default_factory=dict)

    def sources(self, table: PlacementTable) -> Arrays:
        """Stored copy of each parameter that layers read from."""
        return {r.path: (self.params if r.param else self.master)[r.path] for r in table}


def pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Append zeros up to a stored shape."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, shape, strict=True)])


def unpad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Remove the padding of a stored shape."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def updated_values(state: TrainState, row: Row) -> jax.Array:
    """Stored copy of a parameter that the optimizer updates."""
    return (state.master if row.master else state.params)[row.path]


def wide_dtype(row: Row) -> Any:
    """Dtype of a gradient that is passed to the optimizer."""
    return jnp.promote_types(row.updated.dtype, jnp.float32)


@dataclass(frozen=True)
class OptLayout:
    """Placement of each leaf of an optimizer's state.

    A leaf whose path ends in a parameter's path, and that has its shape, is one of its moments and
    has its `opt` placement. Any other leaf (factored moments, preconditioners) of at least `LARGE`
    bytes is sharded by its own shape, and a smaller one replicated.
    """

    table: PlacementTable
    tree: Any
    places: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], Placement]]  # logical, stored

    @classmethod
    def of(cls, table: PlacementTable, abstract: Any, memory: str) -> "OptLayout":
        leaves = flat_with_paths(abstract)
        places = {
            path: _place(path, tuple(leaf.shape), leaf.dtype, table, memory)
            for path, leaf in leaves.items()
        }
        return cls(table, jax.tree.structure(abstract), places)

    def over(self, table: PlacementTable) -> "OptLayout":
        """Lay out the same state by another table."""
        places = {
            path: _place(path, shape, at.dtype, table, at.memory_kind)
            for path, (shape, _, at) in self.places.items()
        }
        return OptLayout(table, self.tree, places)

    def shardings(self) -> Any:
        return jax.tree.unflatten(
            self.tree, [self.table.sharding(p) for _, _, p in self.places.values()]
        )

    def stored(self, opt: Any) -> Any:
        """Pad the optimizer's state to the stored shapes."""
        return self._map(pad, opt, 1)

    def logical(self, opt: Any) -> Any:
        """Unpad the stored state for the optimizer."""
        return self._map(unpad, opt, 0)

    def _map(self, function: Any, opt: Any, which: int) -> Any:
        leaves = jax.tree.leaves(opt)
        shapes = [place[which] for place in self.places.values()]
        moved = [function(x, shape) for x, shape in zip(leaves, shapes, strict=True)]
        return jax.tree.unflatten(self.tree, moved)


def _place(
    path: str, shape: tuple[int, ...], dtype: Any, table: PlacementTable, memory: str
) -> tuple[tuple[int, ...], tuple[int, ...], Placement]:
    owner = owner_of(path, table.rows)
    row = table[owner] if owner else None
    if row is not None and row.opt is not None and row.leaf.shape == shape:
        return shape, row.shape(row.opt), Placement(row.opt.spec, row.opt.memory_kind, dtype)
    spec = jax.sharding.PartitionSpec()
    if math.prod(shape) * jnp.dtype(dtype).itemsize >= LARGE:
        spec = _spec_by_shape(shape, row, table)
    return shape, shape, Placement(spec, memory, dtype)


LARGE = 1 << 20  # bytes


def _spec_by_shape(
    shape: tuple[int, ...], row: Row | None, table: PlacementTable
) -> jax.sharding.PartitionSpec:
    """The axes of a leaf of the optimizer's state that has not its parameter's shape.

    Dims that are the parameter's, by order and size, have its axes where these divide them (so
    that factored moments lie where the gradient does). If moments are sharded over ZeRO's axes
    (from stage 1 on), the largest dim that those divide which are not among these is, too.
    """
    entries: list[Any] = [None] * len(shape)
    if row is not None and row.opt is not None:
        first = 0
        for size, entry in zip(row.leaf.shape, by_dim(row.opt.spec, len(row.leaf.shape))):
            at = next((d for d in range(first, len(shape)) if shape[d] == size), None)
            if at is None:
                continue
            first = at + 1
            if entry and size % num_shards(entry, table.mesh.shape) == 0:
                entries[at] = entry
    sizes = table.mesh.shape
    axes = tuple(axis for axis in storing_axes(entries) if sizes[axis] > 1)
    stored = {axis for r in table if r.opt for axis in spec_axes(r.opt.spec)}
    ranks = product(axes, sizes)
    free = [d for d, n in enumerate(shape) if entries[d] is None and n % ranks == 0]
    if axes and stored.issuperset(axes) and free:
        entries[max(free, key=lambda d: shape[d])] = as_entry(axes)
    return jax.sharding.PartitionSpec(*entries)


def owner_of(path: str, parameters: Mapping[str, Any]) -> str | None:
    """Find the parameter whose path is the longest tail of a state leaf's path."""
    parts = path.split("/")
    tails = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((tail for tail in tails if tail in parameters), None)


def native_tree(model: Any, flat: Mapping[str, Any]) -> Any:
    """Unflatten trained parameters to the model's tree for optimizers; frozen ones are masked."""
    return model.native(flat, optax.MaskedNode())
