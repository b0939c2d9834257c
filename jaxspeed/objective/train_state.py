"""The train state: parameters, masters, optimizer state, variables; padding and state layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim import LossScale
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Placement, Row
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
    has its `opt` placement; any other leaf is replicated on every device.
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
    if row is None or row.opt is None or row.leaf.shape != shape:
        return shape, shape, Placement(jax.sharding.PartitionSpec(), memory, dtype)
    return shape, row.shape(row.opt), Placement(row.opt.spec, row.opt.memory_kind, dtype)


def owner_of(path: str, parameters: Mapping[str, Any]) -> str | None:
    """Find the parameter whose path is the longest tail of a state leaf's path."""
    parts = path.split("/")
    tails = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((tail for tail in tails if tail in parameters), None)


def native_tree(model: Any, flat: Mapping[str, Any]) -> Any:
    """Unflatten trained parameters to the model's tree for optimizers; frozen ones are masked."""
    return model.native(flat, optax.MaskedNode())
