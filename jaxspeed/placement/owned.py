"""Matrices that devices own: each is computed where all of it is.

ZeRO and the model axes store shards of a parameter; orthogonalization, QR and eigenvectors need
entire matrices. The matrices of all parameters of one shape, up to transposition, form a stack, of
which each device owns `ceil(count / ranks)`. One all-to-all brings the shards to the owners, one
brings the results back. Where `pipe` or `expert` shards the stack, a rank owns what it stores.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.axes import copying_axes, product
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.matrices import MatrixView
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import as_entry, by_dim, entry_axes

Arrays = dict[str, jax.Array]
OfStack = Callable[[MatrixView, Arrays], Arrays]
BY_MATRIX = "by_matrix"  # the segment of a path, below which state stays with the owners
SCOPE = "owners"  # named scope of the operations at the owners
UPDATE = "update"  # the array of `OfStack` that is exchanged; all others stay with the owners


class Matrices(NamedTuple):
    """What a function of stacks of matrices reads of a leaf."""

    view: MatrixView
    states: frozenset[str]  # the names of the arrays that stay with the owners
    dtype: Any  # of the array that is exchanged


@dataclass(frozen=True)
class _Layout:
    """How a leaf of a stack is stored: padded, its matrices sharded."""

    view: MatrixView
    stored: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]  # by dim: the axes that shard it
    sizes: Mapping[str, int]
    transposed: bool  # so that its matrices have at most as many rows as columns

    @classmethod
    def of(cls, view: MatrixView, row: Row, mesh: Mesh, oriented: bool) -> "_Layout":
        assert row.opt is not None
        sizes = mesh.shape
        entries = [
            tuple(axis for axis in entry_axes(entry) if sizes[axis] > 1)
            for entry in by_dim(row.opt.spec, len(view.shape))
        ]
        rows, columns = view.matrix
        turn = not oriented and view.heads == 1 and rows > columns
        return cls(view, row.shape(row.opt), tuple(entries), sizes, turn)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The shape of a shard."""
        pairs = zip(self.stored, self.spec, strict=True)
        return tuple(size // product(axes, self.sizes) for size, axes in pairs)

    @property
    def count(self) -> int:
        """Matrices of which a device stores shards."""
        return math.prod(self.local[: self.view.stack])

    @property
    def elements(self) -> int:
        """Elements of one matrix in a shard."""
        return math.prod(self.local[self.view.stack :])

    @property
    def stacking(self) -> tuple[str, ...]:
        """The axes that shard the stack, in the mesh's order: their ranks have other matrices."""
        named = {axis for axes in self.spec[: self.view.stack] for axis in axes}
        return tuple(axis for axis in self.sizes if axis in named)

    def sharding(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that shard a matrix."""
        inside = {axis for entry in self.spec[self.view.stack :] for axis in entry}
        return tuple(axis for axis in axes if axis in inside)

    def joined(self, shards: jax.Array, axes: Sequence[str]) -> jax.Array:
        """`[shards, n, elements]` of n matrices as `[n, rows, columns]`."""
        n = shards.shape[1]
        x = self._of_matrices(n, axes).merged(shards[..., : self.elements])
        x = unpad(x, (n, *self.view.shape[self.view.stack :])).reshape(n, *self.view.matrix)
        return x.mT if self.transposed else x

    def split(self, matrices: jax.Array, axes: Sequence[str], elements: int) -> jax.Array:
        """The inverse of `joined`, with shards padded to so many elements."""
        stack, n = self.view.stack, matrices.shape[0]
        x = matrices.mT if self.transposed else matrices
        x = pad(x.reshape(n, *self.view.shape[stack:]), (n, *self.stored[stack:]))
        x = self._of_matrices(n, axes).divided(x).reshape(-1, n, self.elements)
        return pad(x, (*x.shape[:2], elements))

    def by_rank(self, x: jax.Array) -> jax.Array:
        """`[*stack, ...]` as `[ranks over the stack, count, ...]`."""
        stack = self.view.stack
        rest = self.view.matrix if x.shape == self.view.shape else x.shape[stack:]
        x = pad(x.reshape(*self.view.shape[:stack], *rest), (*self.stored[:stack], *rest))
        return self._of_stack(rest).divided(x).reshape(-1, self.count, *rest)

    def of_ranks(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `by_rank`, of this shape."""
        rest = x.shape[2:]
        x = self._of_stack(rest).merged(x)
        return unpad(x, (*self.view.shape[: self.view.stack], *rest)).reshape(shape)

    def _of_matrices(self, n: int, axes: Sequence[str]) -> "_Shards":
        local, spec = self.local[self.view.stack :], self.spec[self.view.stack :]
        return _Shards((n, *local), ((), *spec), axes, self.sizes)

    def _of_stack(self, rest: tuple[int, ...]) -> "_Shards":
        local, spec = self.local[: self.view.stack], self.spec[: self.view.stack]
        return _Shards((*local, *rest), (*spec, *[()] * len(rest)), self.stacking, self.sizes)


@dataclass(frozen=True)
class _Shards:
    """The shards of an array: their shape, by dim the axes, and the axes in the ranks' order."""

    local: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    axes: Sequence[str]
    sizes: Mapping[str, int]

    def divided(self, x: jax.Array) -> jax.Array:
        """The array as `[ranks, *local]`."""
        sizes, order = self._dims
        return x.reshape(sizes).transpose(order).reshape(-1, *self.local)

    def merged(self, x: jax.Array) -> jax.Array:
        """The inverse of `divided`."""
        sizes, order = self._dims
        x = x.reshape([sizes[dim] for dim in order]).transpose(np.argsort(order))
        return x.reshape([n * product(a, self.sizes) for n, a in zip(self.local, self.spec)])

    @property
    def _dims(self) -> tuple[list[int], list[int]]:
        """The sizes of dims, each divided by its axes, and their order: `axes`, then `local`."""
        sizes: list[int] = []
        of_axis: dict[str, int] = {}
        inside = []
        for size, axes in zip(self.local, self.spec, strict=True):
            of_axis |= {axis: len(sizes) + i for i, axis in enumerate(axes)}
            sizes += [*(self.sizes[axis] for axis in axes), size]
            inside.append(len(sizes) - 1)
        return sizes, [*(of_axis[axis] for axis in self.axes), *inside]


@dataclass(frozen=True)
class OwnedStack:
    """Matrices of equal shape in leaves that are sharded over the same axes.

    `states` names the arrays that stay with the owners: `[slots, ...]`, by the owners' order.
    """

    mesh: Mesh
    layouts: Mapping[str, _Layout]
    owners: tuple[str, ...]  # the axes over whose devices the matrices are distributed
    states: frozenset[str]
    dtype: Any  # of what is exchanged

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self.layouts)

    @property
    def asked(self) -> dict[str, Matrices]:
        """What its function reads of each leaf."""
        states = self.states, self.dtype
        return {path: Matrices(layout.view, *states) for path, layout in self.layouts.items()}

    @property
    def _first(self) -> _Layout:
        return next(iter(self.layouts.values()))

    @property
    def view(self) -> MatrixView:
        return self._first.view

    @cached_property
    def sharding(self) -> tuple[str, ...]:
        """The axes among the owners' that shard a matrix; it is replicated over the others."""
        return self._first.sharding(self.owners)

    @cached_property
    def _copies(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.owners if axis not in self.sharding)

    @property
    def ranks(self) -> int:
        """Number of owners of these matrices."""
        return product(self.owners, self.mesh.shape)

    @property
    def count(self) -> int:
        """Number of matrices that these ranks own together."""
        return sum(layout.count for layout in self.layouts.values())

    @property
    def everywhere(self) -> bool:
        """Whether all ranks compute all matrices: a lone one need not be sent back then."""
        return self.count == 1 or not self.owners

    @property
    def share(self) -> int:
        """Number of matrices that a device computes, the padding of the stack included."""
        return self.count if self.everywhere else -(-self.count // self.ranks)

    @property
    def elements(self) -> int:
        """Elements of one matrix in a shard: the most of all leaves."""
        return max(layout.elements for layout in self.layouts.values())

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes of a device's shards that go to owners, and of what comes back."""
        there = len(self._layout_ids) * self.elements * jnp.dtype(self.dtype).itemsize
        if self.everywhere:
            return (there if self.sharding else 0), 0
        return (there // product(self._copies, self.mesh.shape) if self.sharding else 0), there

    @cached_property
    def _distinct(self) -> list[_Layout]:
        """Layouts that differ in more than the number of matrices."""
        seen: dict[Any, _Layout] = {}
        for layout in self.layouts.values():
            seen.setdefault(_matrix_layout(layout), layout)
        return list(seen.values())

    @cached_property
    def _layout_ids(self) -> np.ndarray:
        """Index in `_distinct` of each matrix's layout, by its position in the padded stack."""
        keys = [_matrix_layout(layout) for layout in self._distinct]
        ids = [keys.index(_matrix_layout(x)) for x in self.layouts.values() for _ in range(x.count)]
        length = self.count if self.everywhere else self.share * self.ranks
        return np.asarray([*ids, *[0] * (length - len(ids))], np.int32)

    def apply(
        self, function: OfStack, leaves: Mapping[str, jax.Array], states: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The updates by path, in the leaves' shapes, and the next states by name."""
        specs = {p: PartitionSpec(*x.spec) for p, x in self.layouts.items()}
        padded = {path: pad(x, self.layouts[path].stored) for path, x in leaves.items()}
        stays = dict.fromkeys(states, self.state_spec)

        def of_device(shards: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
            with jax.named_scope(SCOPE):
                done = function(self.view, {UPDATE: self._received(shards), **states})
                return self._returned(done[UPDATE]), {name: done[name] for name in states}

        run = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(specs, stays),
            out_specs=(specs, stays),
            check_vma=False,
        )
        updates, states = run(padded, states)
        return {path: unpad(x, leaves[path].shape) for path, x in updates.items()}, states

    # -- arrays that stay with the owners --------------------------------------------------------

    @property
    def first(self) -> str:
        """The parameter under whose path a train state has them."""
        return next(iter(self.layouts))

    @property
    def state_spec(self) -> PartitionSpec:
        axes = self._first.stacking
        axes += () if self.everywhere else (*self._copies, *self.sharding)
        return PartitionSpec(as_entry(axes))

    @property
    def slots(self) -> int:
        """Matrices for which there is room on all devices."""
        return product(self._first.stacking, self.mesh.shape) * len(self._layout_ids)

    def packed(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """`[slots, ...]` of values by path, `[*stack, ...]` or of the leaf's shape."""
        x = jnp.concatenate([x.by_rank(values[path]) for path, x in self.layouts.items()], axis=1)
        x = pad(x, (x.shape[0], len(self._layout_ids), *x.shape[2:]))
        return x.reshape(self.slots, *x.shape[2:])

    def unpacked(self, x: jax.Array, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
        """The inverse of `packed`."""
        x = x.reshape(-1, len(self._layout_ids), *x.shape[1:])
        results, start = {}, 0
        for path, layout in self.layouts.items():
            results[path] = layout.of_ranks(x[:, start : start + layout.count], shapes[path])
            start += layout.count
        return results

    # -- on a device: shards of all matrices, or all of the matrices that it owns ------------------

    def _received(self, shards: Mapping[str, jax.Array]) -> jax.Array:
        """The matrices that this device owns."""
        flat = [
            pad(shards[path].reshape(x.count, x.elements), (x.count, self.elements))
            for path, x in self.layouts.items()
        ]
        stack = jnp.concatenate(flat) if len(flat) > 1 else flat[0]
        if self.everywhere:
            pieces = jax.lax.all_gather(stack, self.sharding) if self.sharding else stack[None]
        else:
            stack = pad(stack, (self.share * self.ranks, self.elements))
            stack = stack.reshape(-1, product(self.sharding, self.mesh.shape), *self._part)
            pieces = _piece(stack, self._copies)
            if self.sharding:
                pieces = jax.lax.all_to_all(pieces, self.sharding, 0, 0)
        pieces = pieces.reshape(-1, *self._part)
        joined = [layout.joined(pieces, self.sharding) for layout in self._distinct]
        return self._by_layout(joined, 0)

    @property
    def _part(self) -> tuple[int, int]:
        return self.share, self.elements

    def _returned(self, matrices: jax.Array) -> dict[str, jax.Array]:
        """Shards of all matrices, of those that each device computed."""
        split = [x.split(matrices, self.sharding, self.elements) for x in self._distinct]
        pieces = self._by_layout(split, 1)
        if self.everywhere:
            stack = _piece(pieces, self.sharding)
        else:
            if self.sharding:
                pieces = jax.lax.all_to_all(pieces, self.sharding, 0, 0)
            if self._copies:
                pieces = jax.lax.all_gather(pieces, self._copies)
            stack = pieces.reshape(-1, self.elements)
        results, start = {}, 0
        for path, layout in self.layouts.items():
            rows = stack[start : start + layout.count, : layout.elements]
            results[path] = rows.reshape(layout.local)
            start += layout.count
        return results

    def _by_layout(self, forms: Sequence[jax.Array], dim: int) -> jax.Array:
        """Select for each matrix along `dim` the form that its layout has."""
        first, *others = forms
        if not others:
            return first
        ids = jnp.asarray(self._layout_ids)
        if not self.everywhere:
            start = jax.lax.axis_index((*self._copies, *self.sharding)) * self.share
            ids = jax.lax.dynamic_slice_in_dim(ids, start, self.share)
        ids = ids.reshape(-1, *[1] * (first.ndim - dim - 1))
        for i, form in enumerate(others, 1):
            first = jnp.where(ids == i, form, first)
        return first


def owned_stacks(
    asked: Mapping[str, Matrices], rows: Mapping[str, Row], mesh: Mesh
) -> list[OwnedStack]:
    """The stacks of these leaves on a mesh of several devices.

    Matrices with states are not transposed: rows and columns have states of their own.
    """
    groups: dict[Any, dict[str, _Layout]] = {}
    axes = [axis for axis, n in mesh.shape.items() if n > 1 and axis not in copying_axes()]
    for path, (view, states, dtype) in asked.items():
        layout = _Layout.of(view, rows[path], mesh, bool(states))
        owners = tuple(axis for axis in axes if axis not in layout.stacking)
        if not owners and not layout.stacking:
            continue
        fixed = states or view.heads > 1
        matrix = view.matrix if fixed else tuple(sorted(view.matrix))
        sharding = layout.sharding(owners)
        key = states, jnp.dtype(dtype), matrix, view.heads, owners, layout.stacking, sharding
        groups.setdefault(key, {})[path] = layout
    return [OwnedStack(mesh, group, key[4], *key[:2]) for key, group in groups.items()]


def _matrix_layout(layout: _Layout) -> Any:
    stack = layout.view.stack
    return layout.stored[stack:], layout.spec[stack:], layout.view.shape[stack:], layout.transposed


def _piece(pieces: jax.Array, axes: Sequence[str]) -> jax.Array:
    """This device's entry of `[ranks, ...]`, by its rank over the axes."""
    if not axes:
        return pieces.reshape(pieces.shape[1:])
    return jax.lax.dynamic_index_in_dim(pieces, jax.lax.axis_index(tuple(axes)), keepdims=False)
