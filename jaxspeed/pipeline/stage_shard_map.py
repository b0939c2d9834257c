"""The shard_map over `pipe` that runs stage programs, and the messages between stages.

Arrays that differ from stage to stage have a leading dim of stages, sharded over `pipe`; each stage
sees its row of them. Inside, `pipe` is the only manual axis: sharding over data and tensor is left
to the compiler, and only the messages here communicate between stages.

An idle stage computes on the contents of its buffers, so results are selected, never multiplied by
a mask: NaN times zero is NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import PIPE
from jaxspeed.placement.memory_kinds import in_memory_of, on_device


def on_stages(
    function: Callable[[jax.Array, Any, Any], tuple[Any, Any]],
    stages: int,
    per_stage: Any,
    every: Any,
) -> tuple[Any, Any]:
    """Run `function(stage, own row, every) -> (own row, every)` on all stages.

    `per_stage` has a leading dim of stages, `every` is replicated over them; so are the results.
    """

    def stage_body(stage: jax.Array, per_stage: Any, every: Any) -> tuple[Any, Any]:
        row = jax.tree.map(lambda x: lax.squeeze(x, (0,)), per_stage)
        out, shared = function(stage[0], row, every)
        return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), out), shared

    run = jax.shard_map(
        stage_body,
        in_specs=(P(PIPE), P(PIPE), P()),
        out_specs=(P(PIPE), P()),
        axis_names={PIPE},
        check_vma=False,
    )
    # The stage number is an argument: XLA cannot partition `axis_index` everywhere.
    return run(jnp.arange(stages), per_stage, every)


def send_to_stage(values: Sequence[jax.Array], stages: int, by: int) -> list[jax.Array]:
    """Send every stage's values to the stage `by` further on the ring: the message of a tick."""
    ring = [(i, (i + by) % stages) for i in range(stages)]
    return [lax.ppermute(x, PIPE, ring) for x in values]


def broadcast_from(values: Sequence[jax.Array], is_source: jax.Array) -> list[jax.Array]:
    """One stage's values on all stages; those of the others are ignored."""
    return [sum_over(jnp.where(is_source, x, jnp.zeros_like(x)), (PIPE,)) for x in values]


def sum_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sum over manual axes.

    XLA:CPU aborts where it widens a 16-bit sum by itself in a manual region ("Invalid binary
    instruction opcode copy", jax 0.11.2 and 0.12.0.1).
    """

    def widened(x: jax.Array) -> jax.Array:
        return lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)

    def plain(x: jax.Array) -> jax.Array:
        return lax.psum(x, axes)

    if x.dtype.itemsize != 2:
        return plain(x)
    return lax.platform_dependent(x, cpu=widened, default=plain)


def read_slot(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """One slot of each buffer [slots, ...], on the device even if the buffers are offloaded."""
    return on_device([lax.dynamic_index_in_dim(b, slot, 0, keepdims=False) for b in buffers])


def write_slot(
    buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array], busy: jax.Array
) -> list[jax.Array]:
    """The buffers with a slot replaced, unless the stage is idle."""
    old = read_slot(buffers, slot)
    new = [jnp.where(busy, x, o) for x, o in zip(values, old, strict=True)]
    return [
        lax.dynamic_update_index_in_dim(b, in_memory_of(x, b), slot, 0)
        for b, x in zip(buffers, new, strict=True)
    ]


def blank(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Initial content of messages and slots; no result may depend on it."""
    return jnp.zeros(shape, dtype)
