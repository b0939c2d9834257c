"""Optimizers that see matrices: their functions of stacks, computed by the matrices' owners."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jaxspeed.placement.matrices import MatrixView
from jaxspeed.placement.owned import OfStack
from jaxspeed.placement.table import PlacementTable

Views = Mapping[str, MatrixView]
_asked: ContextVar[list[Views] | None] = ContextVar("_asked", default=None)


def by_owners(
    function: OfStack,
    views: Views,
    arrays: Mapping[str, jax.Array],
    placements: PlacementTable | None = None,
) -> dict[str, jax.Array]:
    """Apply a function of a stack of matrices to the matrices of leaves.

    Args:
      function: `(view, [count, rows, columns]) -> [count, rows, columns]`, of any count. It computes
        each matrix alone, and maps zeros to finite values. The view is of the first leaf of the
        stack; where it has no heads, matrices have at most as many rows as columns.
      views: of the leaves, by path.
      arrays: the leaves, by path.
      placements: of the run, which say what devices own; without them each leaf is computed as it
        is.
    """
    if (asked := _asked.get()) is not None:
        asked.append(views)
    owned = placements.owned if placements else ()
    results: dict[str, jax.Array] = {}
    for stack in owned:
        if stack.paths <= views.keys():
            leaves = {path: arrays[path] for path in stack.layouts}
            results |= stack.apply(function, leaves)
    for path, view in views.items():
        if path not in results:
            results[path] = view.unstacked(function(view, view.stacked(arrays[path])))
    return results


@contextmanager
def views_asked() -> Iterator[list[Views]]:
    """Collect the views with which `by_owners` is called meanwhile."""
    asked: list[Views] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)
