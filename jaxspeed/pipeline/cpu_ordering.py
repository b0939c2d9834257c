"""Ordering of collectives and loops on simulated CPU devices.

XLA:CPU runs independent parts of a program as they come up, on each device in an order of its own
(jax 0.10.2 to 0.12.0). A loop with collectives in it and a message beside it then wait for each
other: on one device the loop holds the thread that the message needs, on another the message the
one that the loop needs. It keeps no barrier, so that only data can put them in order: values are
selected from what they are to wait for by a number of the table that never says so. Real devices
run their programs in order, and better overlap what they can.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.objective.train_state import Arrays
from jaxspeed.pipeline.step_values import Split, Values, inexact
from jaxspeed.placement.memory_kinds import waits
from jaxspeed.placement.mesh import simulated

NEVER = -2  # no micro-batch of a table


def once_there(
    split: Split, values: Sequence[Any], first: Sequence[Any], micro: jax.Array
) -> Values:
    """`values`, not before `first` is there, each like the value at its place.

    `micro` is any micro-batch number of the table.
    """
    if not simulated(split.table.mesh):
        return list(values)
    never = micro == NEVER
    return [
        v if waits(v) else jnp.where(never, f.astype(v.dtype), v)
        for v, f in zip(values, first, strict=True)
    ]


def gathered_once_there(split: Split, first: Any, micro: jax.Array) -> Arrays:
    """The parameters outside of the blocks, whose gathers wait too."""
    outer, table = split.outer, split.table
    paths = [path for path in outer if table[path].gathered]
    waiting = once_all_there(split, [outer[path] for path in paths], first, micro)
    return outer | dict(zip(paths, waiting, strict=True))


def entering(split: Split, micro: jax.Array, ahead: Values) -> tuple[jax.Array, Arrays]:
    """The micro-batch that enters, and the parameters that its way in reads.

    What comes before the blocks would wait for no other part of a tick: XLA makes straight
    programs of short loops, so that it does not wait for the tick before either.
    """
    number = jnp.maximum(micro, 0)
    messages = [x for x in ahead if inexact(x)]
    (number,) = once_all_there(split, [number], messages, micro)
    return number, gathered_once_there(split, messages, micro)


def once_all_there(split: Split, values: Values, first: Any, micro: jax.Array) -> Values:
    """The same for a tree of floating arrays of any shapes, in the global view."""
    leaves = [x for x in jax.tree.leaves(first) if not waits(x)]
    if not leaves or not simulated(split.table.mesh):
        return values
    total = sum(jnp.sum(x).real.astype(jnp.float32) for x in leaves)
    return once_there(split, values, [total] * len(values), micro)
