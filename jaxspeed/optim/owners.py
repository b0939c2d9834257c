"""Whole matrices of an optimizer's update."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxspeed.optim.matrices import MatrixView

Arrays = dict[str, jax.Array]


def by_owners(
    function: Callable[[MatrixView, Arrays], Arrays],
    views: Mapping[str, MatrixView],
    arrays: Mapping[str, Arrays],
    placements: Any = None,
) -> dict[str, Arrays]:
    """Apply a function of stacks of matrices to leaves.

    Args:
      function: `(view, {name: [n, ...]}) -> {name: [n, ...]}`. Each result has the name and the
        shape of an argument. It may close over scalars.
      views: of each leaf, by its path.
      arrays: by path and name, each with the leaf's shape, or `[*stack, ...]`.
      placements: the placement table of the run; None: the arrays are on one device.

    Returns:
      The results by path and name, each with its argument's shape.
    """
    results = {}
    for path, view in views.items():
        stacks = {
            name: view.stacked(x)
            if x.shape == view.shape
            else x.reshape(view.count, *x.shape[view.stack :])
            for name, x in arrays[path].items()
        }
        computed = function(view, stacks)
        results[path] = {name: x.reshape(arrays[path][name].shape) for name, x in computed.items()}
    return results
