"""Matrices that devices own: each is computed where all of it is.

ZeRO and the model axes store shards of a parameter; orthogonalization, QR and eigenvectors need
entire matrices. The matrices of all parameters of one shape, up to transposition, form a stack; each
device owns `ceil(count / ranks)` of it. One all-to-all brings the shards to the owners, one brings
the results back. What a stage of the pipeline or a rank of `expert` stores, its devices own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.axes import copying_axes, product
from jaxspeed.placement.codec import pad, unpad
from jaxspeed.placement.matrices import MatrixView
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import by_dim, entry_axes

OfStack = Callable[[MatrixView, jax.Array], jax.Array]


@dataclass(frozen=True)
class _Layout:
    """How a leaf of a stack is stored: padded, its matrices sharded."""

    view: MatrixView
    stored: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]  # by dim: the axes that shard it
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, view: MatrixView, row: Row, mesh: Mesh) -> "_Layout":
        assert row.opt is not None
        sizes = mesh.shape
        entries = [
            tuple(axis for axis in entry_axes(entry) if sizes[axis] > 1)
            for entry in by_dim(row.opt.spec, len(view.shape))
        ]
        return cls(view, row.shape(row.opt), tuple(entries), sizes)

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
    def stacking(self) -> frozenset[str]:
        """The axes that shard the stack: their ranks have other matrices."""
        return frozenset(axis for axes in self.spec[: self.view.stack] for axis in axes)

    def sharding(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that shard a matrix."""
        inside = {axis for entry in self.spec[self.view.stack :] for axis in entry}
        return tuple(axis for axis in axes if axis in inside)

    @property
    def transposed(self) -> bool:
        rows, columns = self.view.matrix
        return self.view.heads == 1 and rows > columns

    def joined(self, shards: jax.Array, axes: Sequence[str]) -> jax.Array:
        """`[shards, n, elements]` of n matrices as `[n, rows, columns]`."""
        stack, n = self.view.stack, shards.shape[1]
        local, spec = self.local[stack:], self.spec[stack:]
        x = shards[..., : self.elements]
        x = x.reshape(*(self.sizes[axis] for axis in axes), n, *local)
        order = [len(axes)]
        for dim, entry in enumerate(spec):
            order += [*map(axes.index, entry), len(axes) + 1 + dim]
        full = self.stored[stack:]
        x = x.transpose(order).reshape(n, *full)
        x = unpad(x, (n, *self.view.shape[stack:])).reshape(n, *self.view.matrix)
        return x.mT if self.transposed else x

    def split(self, matrices: jax.Array, axes: Sequence[str], elements: int) -> jax.Array:
        """The inverse of `joined`, with shards padded to so many elements."""
        stack, n = self.view.stack, matrices.shape[0]
        local, spec = self.local[stack:], self.spec[stack:]
        x = matrices.mT if self.transposed else matrices
        x = pad(x.reshape(n, *self.view.shape[stack:]), (n, *self.stored[stack:]))
        sizes, front, back = [n], [], [0]
        for size, entry in zip(local, spec, strict=True):
            front += range(len(sizes), len(sizes) + len(entry))
            sizes += [*(self.sizes[axis] for axis in entry), size]
            back.append(len(sizes) - 1)
        named = [axis for entry in spec for axis in entry]
        first = [front[named.index(axis)] for axis in axes]
        x = x.reshape(sizes).transpose(*first, *back).reshape(-1, n, self.elements)
        return pad(x, (*x.shape[:2], elements))


@dataclass(frozen=True)
class OwnedStack:
    """Matrices of equal shape in leaves that are sharded over the same axes."""

    mesh: Mesh
    layouts: Mapping[str, _Layout]
    owners: tuple[str, ...]  # the axes over whose devices the matrices are distributed

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self.layouts)

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

    @cached_property
    def _distinct(self) -> list[_Layout]:
        """Layouts that differ in more than the number of matrices."""
        seen: dict[Any, _Layout] = {}
        for layout in self.layouts.values():
            seen.setdefault(_matrix_layout(layout), layout)
        return list(seen.values())

    @cached_property
    def _layout_ids(self) -> np.ndarray:
        """Of each position in the padded stack, which of `_distinct` its matrix has."""
        keys = [_matrix_layout(layout) for layout in self._distinct]
        ids = [keys.index(_matrix_layout(x)) for x in self.layouts.values() for _ in range(x.count)]
        length = self.count if self.everywhere else self.share * self.ranks
        return np.asarray([*ids, *[0] * (length - len(ids))], np.int32)

    def apply(self, function: OfStack, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The function's results by path, in the leaves' shapes."""
        specs = {p: PartitionSpec(*x.spec) for p, x in self.layouts.items()}
        padded = {path: pad(x, self.layouts[path].stored) for path, x in leaves.items()}

        def of_device(shards: dict[str, jax.Array]) -> dict[str, jax.Array]:
            with jax.named_scope("owners"):
                return self._returned(function(self.view, self._received(shards)))

        run = jax.shard_map(
            of_device, mesh=self.mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return {path: unpad(x, leaves[path].shape) for path, x in run(padded).items()}

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
        """Of each matrix along `dim`, the form of its layout."""
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
    views: Mapping[str, MatrixView], rows: Mapping[str, Row], mesh: Mesh
) -> list[OwnedStack]:
    """The stacks of these leaves on a mesh of several devices."""
    groups: dict[Any, dict[str, _Layout]] = {}
    axes = [axis for axis, n in mesh.shape.items() if n > 1 and axis not in copying_axes()]
    for path, view in views.items():
        layout = _Layout.of(view, rows[path], mesh)
        owners = tuple(axis for axis in axes if axis not in layout.stacking)
        if not owners and not layout.stacking:
            continue
        matrix = view.matrix if view.heads > 1 else tuple(sorted(view.matrix))
        key = matrix, view.heads, owners, layout.sharding(owners)
        groups.setdefault(key, {})[path] = layout
    return [OwnedStack(mesh, layouts, owners) for (_, _, owners, _), layouts in groups.items()]


def _matrix_layout(layout: _Layout) -> Any:
    stack = layout.view.stack
    return layout.stored[stack:], layout.spec[stack:], layout.view.shape[stack:], layout.transposed


def _piece(pieces: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The one of `[ranks, ...]` with this device's rank over the axes."""
    if not axes:
        return pieces.reshape(pieces.shape[1:])
    return jax.lax.dynamic_index_in_dim(pieces, jax.lax.axis_index(tuple(axes)), keepdims=False)
