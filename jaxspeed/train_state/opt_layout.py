"""Placement of each leaf of an optimizer's state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxspeed.axes import product, storing_axes
from jaxspeed.placement.codec import PLAIN, Stored, StoredValue, codec_of
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.owned import BY_MATRIX, OwnedStack
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Placement, Row
from jaxspeed.placement.specs import as_entry, by_dim, entry_axes, num_shards, spec_axes
from jaxspeed.placement.table import PlacementTable, StateLeaf


@dataclass(frozen=True)
class PackedLeaves:
    """Leaves of the optimizer's state that stay with the owners of one stack of matrices.

    A train state has the stack's array under the first of their paths, and empty ones under others.
    """

    stack: OwnedStack
    paths: Mapping[str, str]  # by parameter
    shapes: Mapping[str, tuple[int, ...]]  # by parameter

    @property
    def first(self) -> str:
        return self.paths[self.stack.first]

    def places(self, leaves: Mapping[str, StateLeaf]) -> dict[str, StateLeaf]:
        """The leaves as a train state has them, from those by parameter."""
        at = leaves[self.first].placement
        empty = StateLeaf((0,), (0,), replace(at, spec=jax.sharding.PartitionSpec()))
        placed = dict.fromkeys(self.paths.values(), empty)
        values = {p: jax.ShapeDtypeStruct(shape, at.dtype) for p, shape in self.shapes.items()}
        shape = jax.eval_shape(self.stack.packed, values).shape
        placed[self.first] = StateLeaf(shape, shape, replace(at, spec=self.stack.state_spec))
        return placed

    def saved(self, path: str, leaf: StateLeaf) -> StateLeaf:
        """A leaf by parameter, sharded along a dim of its matrices."""
        parameter = next(p for p, name in self.paths.items() if name == path)
        stack = self.stack.layouts[parameter].view.stack
        entries: list[Any] = [None] * len(leaf.shape)
        if dim := self._dim:
            entries[stack if dim == 1 else -1] = self.stack.state_spec[0]
        spec = jax.sharding.PartitionSpec(*entries)
        return StateLeaf(leaf.shape, leaf.shape, replace(leaf.placement, spec=spec))

    def pack(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves of a train state, from those by parameter."""
        stack = self.stack.packed({p: leaves[path] for p, path in self.paths.items()})
        stack, empty = self._along_matrices(stack), jnp.zeros((0,), stack.dtype)
        return {path: stack if path == self.first else empty for path in self.paths.values()}

    def unpack(self, stack: Any) -> dict[str, Any]:
        """The leaves by parameter, from the stack's array."""
        values = self.stack.unpacked(self._along_matrices(stack), self.shapes)
        return {self.paths[parameter]: value for parameter, value in values.items()}

    def _along_matrices(self, stack: jax.Array) -> jax.Array:
        """Shard a dim of the matrices instead of the stack, by one all-to-all.

        XLA would replicate the stack on the way to the leaves.
        """
        entries: list[Any] = [None] * stack.ndim
        if dim := self._dim:
            entries[dim] = self.stack.state_spec[0]
        spec = jax.sharding.PartitionSpec(*entries)
        return constrain(stack, NamedSharding(self.stack.mesh, spec), "packed")

    @cached_property
    def _dim(self) -> int:
        """The dim of the stack's array that is one dim in all leaves and that all devices divide.

        0 if there is none.
        """
        ranks = product(entry_axes(self.stack.state_spec[0]), self.stack.mesh.shape)
        views = [layout.view for layout in self.stack.layouts.values()]
        pairs = list(zip(views, self.shapes.values(), strict=True))
        rows = all(shape != view.shape or view.rows == 1 for view, shape in pairs)
        columns = all(
            shape != view.shape or view.stack + view.rows + 1 == len(shape) for view, shape in pairs
        )
        by_matrix = (
            views[0].matrix if pairs[0][1] == views[0].shape else pairs[0][1][views[0].stack :]
        )
        for dim, single in ((1, rows), (len(by_matrix), columns)):
            if by_matrix and single and by_matrix[dim - 1] % ranks == 0:
                return dim
        return 0


@dataclass(frozen=True)
class OptLayout:
    """Placement of each leaf of an optimizer's state.

    A leaf whose path ends in a parameter's path, and that has its shape, is one of its moments and
    has its `opt` placement. Any other leaf (factored moments, preconditioners) of at least `LARGE`
    bytes is sharded by its own shape, and a smaller one replicated. State that stays with the
    owners of matrices is packed.
    """

    table: PlacementTable
    tree: Any
    by_parameter: Mapping[str, StateLeaf]  # as checkpoints have them
    packed: Sequence[PackedLeaves] = ()

    @classmethod
    def of(cls, table: PlacementTable, abstract: Any, memory: str) -> "OptLayout":
        leaves = flat_with_paths(abstract)
        places = {
            path: _place(path, tuple(leaf.shape), leaf.dtype, table, memory)
            for path, leaf in leaves.items()
        }
        return cls(table, jax.tree.structure(abstract), places, _packed(places, table))

    def over(self, table: PlacementTable) -> "OptLayout":
        """Lay out the same state by another table."""
        places = {
            path: _place(path, leaf.shape, at.dtype, table, at.memory_kind)
            for path, leaf in self.by_parameter.items()
            for at in [leaf.placement]
        }
        return OptLayout(table, self.tree, places, _packed(places, table))

    @cached_property
    def places(self) -> Mapping[str, StateLeaf]:
        """The leaves as a train state has them."""
        places = dict(self.by_parameter)
        for group in self.packed:
            places |= group.places(self.by_parameter)
        return places

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
        """Pad and encode the optimizer's state; pack a fresh one, without `keep`.

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
        leaves = dict(zip(self.places, jax.tree.leaves(opt), strict=True))
        for group in self.packed if keep is None else ():
            leaves |= group.pack(leaves)
        pairs = [stored(path, self.values[path], x) for path, x in leaves.items()]
        return jax.tree.unflatten(self.tree, pairs)

    def moved(self, opt: Any, stored: "OptLayout") -> Any:
        """The state of another layout; what has the same codec is not rounded again."""
        logical = dict(zip(stored.places, jax.tree.leaves(stored.logical(opt)), strict=True))
        for group in stored.packed:
            logical |= group.unpack(logical[group.first])
        rest = self.flat(self.stored(jax.tree.unflatten(self.tree, logical.values())))
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


def _packed(leaves: Mapping[str, StateLeaf], table: PlacementTable) -> tuple[PackedLeaves, ...]:
    groups = []
    for stack in table.owned:
        by_state: dict[str, dict[str, str]] = {}
        for path in leaves:
            for parameter in stack.layouts:
                before = path.removesuffix(f"/{parameter}")
                *_, marker, name = ("", *before.split("/"))
                if before != path and marker == BY_MATRIX and name in stack.states:
                    by_state.setdefault(before, {})[parameter] = path
        for paths in by_state.values():
            in_order = {parameter: paths[parameter] for parameter in stack.layouts}
            shapes = {parameter: leaves[path].shape for parameter, path in in_order.items()}
            groups.append(PackedLeaves(stack, in_order, shapes))
    return tuple(groups)


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
