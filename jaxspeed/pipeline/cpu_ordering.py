"""Ordering of collectives and loops on simulated CPU devices.

XLA:CPU runs independent parts of a program as they become ready, on each device in another order
(jax 0.11.2 to 0.12.0). A loop that contains collectives and a concurrent message then deadlock: on
one device the loop holds the thread that the message needs, on another the message holds the thread
that the loop needs. XLA:CPU drops optimization barriers, so only data dependences order them: a
`where` selects between the value and what it has to follow, on a micro-batch number that never
occurs. Accelerators run programs in order, and should overlap what they can.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.pipeline.step_values import SplitStep, Values, inexact
from jaxspeed.placement.memory_kinds import on_host
from jaxspeed.placement.mesh import simulated
from jaxspeed.train_state.state import Arrays

NEVER = -2  # no micro-batch of a table


def ordered_after(
    split: SplitStep, values: Sequence[Any], first: Sequence[Any], micro: jax.Array
) -> Values:
    """`values`, made to depend on `first`, an array of equal shape for each.

    `micro` is any micro-batch number of the table.
    """
    if not simulated(split.table.mesh):
        return list(values)
    never = micro == NEVER
    return [
        v if on_host(v) else jnp.where(never, f.astype(v.dtype), v)
        for v, f in zip(values, first, strict=True)
    ]


def gathers_ordered_after(split: SplitStep, first: Any, micro: jax.Array) -> Arrays:
    """The parameters outside of the blocks, with their gathers ordered after `first`."""
    outer, table = split.outer, split.table
    paths = [path for path in outer if table[path].gathered]
    leaves, tree = jax.tree.flatten({path: outer[path] for path in paths})
    return outer | jax.tree.unflatten(tree, all_ordered_after(split, leaves, first, micro))


def entering(split: SplitStep, micro: jax.Array, ahead: Values) -> tuple[jax.Array, Arrays]:
    """The number of the entering micro-batch and the embedding's parameters, after `ahead`.

    The embedding depends on no other part of a tick, and since XLA unrolls short loops, not on the
    tick before either.
    """
    number = jnp.maximum(micro, 0)
    messages = [x for x in ahead if inexact(x)]
    (number,) = all_ordered_after(split, [number], messages, micro)
    return number, gathers_ordered_after(split, messages, micro)


def all_ordered_after(split: SplitStep, values: Values, first: Any, micro: jax.Array) -> Values:
    """`ordered_after` a tree of floating arrays of any shapes, in the global view."""
    leaves = [x for x in jax.tree.leaves(first) if not on_host(x)]
    if not leaves or not simulated(split.table.mesh):
        return values
    total = sum(jnp.sum(x).real.astype(jnp.float32) for x in leaves)
    return ordered_after(split, values, [total] * len(values), micro)
