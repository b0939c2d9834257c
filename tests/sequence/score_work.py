"""The blocks of the scores that each device of a sequence axis computes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.axes import SEQ
from jaxspeed.ops import sequence_passes
from jaxspeed.ops.mask import Segments
from jaxspeed.ops.score_blocks import ScoreBlocks

BLOCK = 16


def work_of_devices(
    run: Callable[[], Any], length: int, monkeypatch: pytest.MonkeyPatch, devices: int = 8
) -> np.ndarray:
    """Blocks of each device in the forward passes that `run()` computes, as shares of a square."""
    calls = []

    def record(device: Any, offset: Any, ids: Any, *, mask: Any, lengths: Any) -> None:
        blocks = ScoreBlocks(mask, 1.0, None, *lengths, BLOCK, BLOCK)
        seen = None
        if ids[0].size:
            seen = [x[0] for x in blocks.seen_by_queries(Segments(*map(jnp.asarray, ids)))]
        numbers = jnp.arange(blocks.blocks_q)
        first, stop = jax.vmap(
            lambda i: blocks.keys_of(blocks.rows_of(i, jnp.asarray(offset)), seen, i)
        )(numbers)
        calls.append((int(device), int(jnp.maximum(stop - first, 0).sum())))

    def passes(form: Any, pair: Any, q: Any, k: Any, segments: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, segments: Any) -> Any:
            offset = jnp.int32(0) if pair.offset is None else pair.offset
            lengths = q.shape[1], k.shape[1]
            ids = segments or (jnp.zeros((1, 0), jnp.int32),) * 2
            jax.debug.callback(
                functools.partial(record, mask=pair.mask, lengths=lengths),
                *(jax.lax.axis_index(SEQ), offset, tuple(ids)),
            )
            return jnp.zeros_like(q), jnp.zeros((*q.shape[::2], q.shape[1]), jnp.float32)

        return forward, None

    monkeypatch.setattr(sequence_passes, "_kernel_passes", passes)
    jax.block_until_ready(run())
    jax.effects_barrier()
    of_device = np.zeros(devices)
    for device, count in calls:
        of_device[device] += count
    return of_device / (length // BLOCK) ** 2
