"""Gradient accumulation in host memory, streamed slice by slice."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.objective.accumulate import running_mean
from jaxspeed.offload.streaming import StreamedArray, choose_walk, stream
from jaxspeed.placement.memory_kinds import to_device, to_host

SEEN, NEW = "seen", "new"
PIECE = 1 << 25  # elements of a device that are on it at once


def zeros_in_host(lane: StreamedArray, dtype: Any, layers: bool) -> jax.Array:
    """Zeros in host memory; of those that stack `layers` the device never holds more than one."""
    if not layers or lane.entry(0) is not None or lane.shape[0] == 1:
        return to_host(jnp.zeros(lane.shape, dtype), lane.at)

    def one(carry: None, _: None) -> tuple[None, jax.Array]:
        return None, jax.device_put(jnp.zeros(lane.shape[1:], dtype), jax.memory.Space.Host)

    return jax.lax.scan(one, None, length=lane.shape[0])[1]


def mean_in_host(
    seen: jax.Array, new: jax.Array, lane: StreamedArray, share: jax.Array
) -> jax.Array:
    """`running_mean` of arrays in host memory that are sharded alike."""
    lanes = {SEEN: lane, NEW: lane}
    most = min(PIECE, max(1, math.prod(lane.at.shard_shape(lane.shape)) // max(lane.shape[0], 1)))
    walk = choose_walk(lanes, lane, range(len(lane.shape)), most) if lane.shape else None
    if walk is None:
        mean = running_mean(to_device(seen, lane.at), to_device(new, lane.at), share)
        return to_host(mean, lane.at)

    def compute(pieces: dict[str, Any], start: Any, rows: int) -> dict[str, Any]:
        return {SEEN: running_mean(pieces[SEEN], pieces[NEW], share)}

    return stream(walk, lanes, {NEW: new}, {SEEN: seen}, compute)[SEEN]
