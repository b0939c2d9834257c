"""Staged initialization of host arrays: a bounded number of bytes on the device at once.

A single program may compute all of them on the device before it copies any, at its scheduler's
choice. Here the program is traced once and run per group of results.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

_GROUP_BYTES = 256 << 20  # per device


def init_in_groups(function: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """Evaluate `function(*args)` into these shardings, one group of results per program."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, places = jax.tree.leaves(shape), jax.tree.leaves(shardings)
    inputs = jax.tree.leaves(args)
    results: list[Any] = []
    for group in _groups(leaves, places):

        def some(*inputs: Any, group: Sequence[int] = group) -> list[Any]:
            values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *inputs)
            return [values[i] for i in group]

        run = jax.jit(some, out_shardings=[places[i] for i in group])
        results += jax.block_until_ready(run(*inputs))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _groups(leaves: Sequence[Any], places: Sequence[Any]) -> Iterator[list[int]]:
    total = 0

    def group(i: int) -> int:
        nonlocal total
        elements = math.prod(places[i].shard_shape(leaves[i].shape))
        total += elements * getattr(leaves[i].dtype, "itemsize", 1)
        return total // _GROUP_BYTES

    for _, numbers in itertools.groupby(range(len(leaves)), group):
        yield list(numbers)
