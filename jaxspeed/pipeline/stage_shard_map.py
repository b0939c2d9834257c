"""The shard_map over `pipe`: what each stage runs by itself, and messages between stages.

Arrays that differ from stage to stage have a leading dim of stages, cut over `pipe`. A lane (one
stage's instance) sees its own row of them. Inside, `pipe` is the only manual axis: what data and
tensor cut stays the compiler's business, and nothing but the messages here crosses stages.

An idle lane computes on whatever its buffers hold, so results are selected, never multiplied by a
mask: a NaN times zero would reach them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.placement.memory_kinds import moved_like, on_device

PIPE = "pipe"


def on_stages(
    function: Callable[[jax.Array, Any, Any], tuple[Any, Any]], stages: int, own: Any, every: Any
) -> tuple[Any, Any]:
    """`function(stage, own row, every) -> (own row, every)` on all stages at once.

    `own` has a leading dim of stages, `every` is the same on all of them; of the results too.
    """

    def lane(stage: jax.Array, own: Any, every: Any) -> tuple[Any, Any]:
        row = jax.tree.map(lambda x: lax.squeeze(x, (0,)), own)
        out, shared = function(stage[0], row, every)
        return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), out), shared

    run = jax.shard_map(
        lane,
        in_specs=(P(PIPE), P(PIPE), P()),
        out_specs=(P(PIPE), P()),
        axis_names={PIPE},
        check_vma=False,
    )
    # Each lane is told its number: `axis_index` is no instruction that XLA can always place.
    return run(jnp.arange(stages), own, every)


def hand_on(values: Sequence[jax.Array], stages: int, by: int) -> list[jax.Array]:
    """Every lane's values to the lane `by` further on the ring: the message of a tick."""
    ring = [(i, (i + by) % stages) for i in range(stages)]
    return [lax.ppermute(x, PIPE, ring) for x in values]


def from_one(values: Sequence[jax.Array], is_it: jax.Array) -> list[jax.Array]:
    """One lane's values to all lanes; what the others have may be anything."""
    return [_sum(jnp.where(is_it, x, jnp.zeros_like(x))) for x in values]


def _sum(x: jax.Array) -> jax.Array:
    """Over all lanes. XLA:CPU aborts where it widens a 16-bit sum by itself in a lane ("Invalid
    binary instruction opcode copy", jax 0.10.2 and 0.12.0)."""

    def widened(x: jax.Array) -> jax.Array:
        return lax.psum(x.astype(jnp.float32), PIPE).astype(x.dtype)

    def plain(x: jax.Array) -> jax.Array:
        return lax.psum(x, PIPE)

    if x.dtype.itemsize != 2:
        return plain(x)
    return lax.platform_dependent(x, cpu=widened, default=plain)


def read_slot(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """One slot of each buffer [slots, ...], on the device wherever the buffers wait."""
    return on_device([lax.dynamic_index_in_dim(b, slot, 0, keepdims=False) for b in buffers])


def write_slot(
    buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array], busy: jax.Array
) -> list[jax.Array]:
    """The buffers with a slot replaced, unless the lane is idle."""
    old = read_slot(buffers, slot)
    new = [jnp.where(busy, x, o) for x, o in zip(values, old, strict=True)]
    return [
        lax.dynamic_update_index_in_dim(b, moved_like(x, b), slot, 0)
        for b, x in zip(buffers, new, strict=True)
    ]


def blank(shape: Sequence[int], dtype: Any) -> jax.Array:
    """What messages and slots hold before the first real one: nothing may depend on it."""
    return jnp.zeros(shape, dtype)
