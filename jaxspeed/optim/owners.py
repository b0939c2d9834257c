"""Optimizers that see matrices: their functions of stacks, computed by the matrices' owners."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from jaxspeed.placement.matrices import MatrixView
from jaxspeed.placement.owned import UPDATE, Arrays, Matrices, OfStack
from jaxspeed.placement.table import PlacementTable

LARGE = 1 << 22  # elements of the arrays that an owner computes at a time

_asked: ContextVar[list[Mapping[str, Matrices]] | None] = ContextVar("_asked", default=None)


class ByMatrix(NamedTuple):
    """State of an optimizer that stays with the owners of matrices.

    A train state has such trees in another form, which `by_owners` reads and writes: of parameters
    whose matrices are one stack the first has `[slots, ...]` and the others are empty.
    """

    by_matrix: dict[str, Any]  # by name a tree as the parameters: `[*stack, ...]`, or as they are


class Unrounded(ByMatrix):
    """Such state that is never stored in 16 bits."""


def by_owners(
    function: OfStack,
    views: Mapping[str, MatrixView],
    arrays: Mapping[str, Arrays],
    placements: PlacementTable | None = None,
) -> dict[str, Arrays]:
    """Apply a function of stacks of matrices to leaves.

    Args:
      function: `(view, {name: [n, ...]}) -> {name: [n, ...]}`, of any n; the results have the names
        and shapes of the arguments. It computes each matrix alone, and zeros give finite values. It
        may close over scalars. The view is of the first leaf of a stack; where "update" is the only
        array and the view has no heads, its matrices have at most as many rows as columns.
      views: of each leaf, by its path.
      arrays: by path and name. "update" has the leaf's shape; all others are of a `ByMatrix` state.
      placements: the placement table of the run, which has what devices own; without it each leaf
        is computed as it is.

    Returns:
      The results by path and name, each with its argument's shape.
    """
    if placements and (asked := _asked.get()) is not None:
        asked.append(
            {
                path: Matrices(view, frozenset(arrays[path]) - {UPDATE}, arrays[path][UPDATE].dtype)
                for path, view in views.items()
            }
        )
    results: dict[str, Arrays] = {}
    for stack in placements.owned if placements else ():
        if not stack.paths <= views.keys():
            continue
        states = {name: arrays[stack.first][name] for name in stack.states}
        updates = {path: arrays[path][UPDATE] for path in stack.layouts}
        updates, states = stack.apply(function, updates, states)
        for path, update in updates.items():
            results[path] = {**arrays[path], UPDATE: update}
        results[stack.first] |= states
    for path in views.keys() - results.keys():
        results[path] = _of_leaf(function, views[path], arrays[path])
    return results


def _of_leaf(function: OfStack, view: MatrixView, arrays: Arrays) -> Arrays:
    stacks = {
        name: view.stacked(x)
        if x.shape == view.shape
        else x.reshape(view.count, *x.shape[view.stack :])
        for name, x in arrays.items()
    }
    return {name: x.reshape(arrays[name].shape) for name, x in function(view, stacks).items()}


def in_batches(function: Callable[[Arrays], Arrays], arrays: Arrays) -> Arrays:
    """Apply a function of one matrix's arrays to stacks: all at once if they are small."""
    count = arrays[UPDATE].shape[0]
    batch = max(1, LARGE * count // sum(x.size for x in arrays.values()))
    if batch >= count:
        return jax.vmap(function)(arrays)
    return jax.lax.map(function, arrays, batch_size=batch if batch > 1 else None)


@contextmanager
def matrices_asked() -> Iterator[list[Mapping[str, Matrices]]]:
    """Collect what `by_owners` is called with meanwhile."""
    asked: list[Mapping[str, Matrices]] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
