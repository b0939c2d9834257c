"""Staged initialization of host arrays, with few of them on the device at once.

One program would make all of them on the device first, as far as its scheduler likes. Here the
program is traced once and run in groups, each of which makes some of its results.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

_TOGETHER = 256 << 20  # bytes a device


def made_in_groups(function: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """`function(*args)`, its results in these shardings."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, places = jax.tree.leaves(shape), jax.tree.leaves(shardings)
    inputs = jax.tree.leaves(args)
    made: list[Any] = []
    for group in _groups(leaves, places):

        def some(*inputs: Any, group: Sequence[int] = group) -> list[Any]:
            values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *inputs)
            return [values[i] for i in group]

        run = jax.jit(some, out_shardings=[places[i] for i in group])
        made += jax.block_until_ready(run(*inputs))
    return jax.tree.unflatten(jax.tree.structure(shape), made)


def _groups(leaves: Sequence[Any], places: Sequence[Any]) -> Iterator[list[int]]:
    total = 0

    def group(i: int) -> int:
        nonlocal total
        elements = math.prod(places[i].shard_shape(leaves[i].shape))
        total += elements * getattr(leaves[i].dtype, "itemsize", 1)
        return total // _TOGETHER

    for _, numbers in itertools.groupby(range(len(leaves)), group):
        yield list(numbers)
