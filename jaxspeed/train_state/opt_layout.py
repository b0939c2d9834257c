"""Placement of each leaf of an optimizer's state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.axes import product, storing_axes
from jaxspeed.placement.codec import PLAIN, Stored, StoredValue, codec_of
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Placement, Row
from jaxspeed.placement.specs import as_entry, by_dim, num_shards, spec_axes
from jaxspeed.placement.table import PlacementTable, StateLeaf


@dataclass(frozen=True)
class OptLayout:
    """Placement of each leaf of an optimizer's state.

    A leaf whose path ends in a parameter's path, and that has its shape, is one of its moments and
    has its `opt` placement. Any other leaf (factored moments, preconditioners) of at least `LARGE`
    bytes is sharded by its own shape, and a smaller one replicated.
    """

    table: PlacementTable
    tree: Any
    places: Mapping[str, StateLeaf]

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
            path: _place(path, leaf.shape, at.dtype, table, at.memory_kind)
            for path, leaf in self.places.items()
            for at in [leaf.placement]
        }
        return OptLayout(table, self.tree, places)

    @cached_property
    def values(self) -> dict[str, StoredValue]:
        """The arrays of each leaf, by its path."""
        return {path: self.table.stored_leaf(leaf) for path, leaf in self.places.items()}

    def flat(self, opt: Any) -> dict[str, Stored]:
        """The stored leaves of an optimizer's state by path."""
        return dict(zip(self.places, self.tree.flatten_up_to(opt), strict=True))

    def shardings(self) -> Any:
        return jax.tree.unflatten(self.tree, [v.shardings for v in self.values.values()])

    def stored(self, opt: Any, before: Any = None, keep: jax.Array | None = None) -> Any:
        """Pad and encode the optimizer's state.

        Where `keep` is false, encoded leaves are those of `before`: to decode and encode again
        could change them.
        """

        def stored(path: str, value: StoredValue, leaf: Any) -> Stored:
            if keep is None and value.codec != PLAIN:
                # XLA would encode the zeros of a fresh state while it compiles, in minutes.
                leaf = jax.lax.optimization_barrier(leaf)
            encoded = value.encode(leaf)
            if keep is None or value.codec == PLAIN:
                return encoded
            return jax.tree.map(lambda new, old: jnp.where(keep, new, old), encoded, old[path])

        old = {} if keep is None else self.flat(before)
        pairs = zip(self.values.items(), jax.tree.leaves(opt), strict=True)
        return jax.tree.unflatten(self.tree, [stored(p, value, x) for (p, value), x in pairs])

    def moved(self, opt: Any, stored: "OptLayout") -> Any:
        """The state of another layout; what has the same codec is not rounded again."""
        rest = self.flat(self.stored(stored.logical(opt)))
        for path, x in stored.flat(opt).items():
            value = self.values[path]
            if value.codec == stored.values[path].codec:
                kept = value.codec.repadded(x, value.shape, value.arrays)
                rest[path] = rest[path] if kept is None else kept
        return jax.tree.unflatten(self.tree, rest.values())

    def logical(self, opt: Any) -> Any:
        """Decode and unpad the stored state for the optimizer."""
        pairs = zip(self.values.values(), self.tree.flatten_up_to(opt), strict=True)
        return jax.tree.unflatten(self.tree, [value.decode(x) for value, x in pairs])


def _place(
    path: str, shape: tuple[int, ...], dtype: Any, table: PlacementTable, memory: str
) -> StateLeaf:
    owner = owner_of(path, table.rows)
    row = table[owner] if owner else None
    if row is not None and row.opt is not None and row.leaf.shape == shape:
        codec = codec_of(table.codecs, "opt", path, row.path)
        at = replace(row.opt, dtype=dtype, codec=codec)
        return StateLeaf(shape, row.shape(row.opt), at, row.leaf.stacked)
    spec = jax.sharding.PartitionSpec()
    if math.prod(shape) * jnp.dtype(dtype).itemsize >= LARGE:
        spec = _spec_by_shape(shape, row, table)
    return StateLeaf(shape, shape, Placement(spec, memory, dtype))


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
