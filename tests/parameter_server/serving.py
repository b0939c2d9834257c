"""Runs with a parameter server, and the same as data parallelism: four devices compute in both."""

import gc
from collections import Counter
from typing import Any

import jax
import numpy as np

from tests.engine import tiny

RANKS, SERVERS, MICRO = 4, 2, 2
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
BF16 = {"bf16": {"enabled": True}}
DROP = {"max_staleness": 4, "on_stale": "drop"}
WAIT = {"max_staleness": 4, "on_stale": "wait"}
SLOWED = [1.0, 1.0, 1.0, 5.0]


def served(
    servers: int = SERVERS, *, ranks: int = RANKS, accumulation: int = 1, model: Any = tiny.Listed,
    loss_fn: Any = tiny.squared_error, parallel: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """`parallel` are words beside `servers`."""
    words = {"data_reduction": "parameter_server", "servers": servers, **(parallel or {})}
    return _engine(ranks + servers, accumulation, model, loss_fn, parallel=words, **more)


def data_parallel(
    *, accumulation: int = 1, model: Any = tiny.Listed, loss_fn: Any = tiny.squared_error,
    **more: Any,
) -> Any:  # fmt: skip
    return _engine(RANKS, accumulation, model, loss_fn, **more)


def _engine(count: int, accumulation: int, model: Any, loss_fn: Any, **more: Any) -> Any:
    more = {"optimizer": ADAM, "run": {"seed": 3}} | more
    return tiny.engine(
        model,
        loss_fn,
        devices=jax.devices()[:count],
        train_micro_batch_size_per_gpu=MICRO,
        gradient_accumulation_steps=accumulation,
        **more,
    )


def batch(step: int, accumulation: int = 1) -> dict[str, np.ndarray]:
    return tiny.batch(RANKS * MICRO * accumulation, seed=step)


def train(engine: Any, steps: int, accumulation: int = 1, first: int = 0) -> list[dict[str, Any]]:
    """Each step's metrics."""
    told = [engine.train_batch(batch(first + step, accumulation)) for step in range(steps)]
    return [{name: float(x) for name, x in metrics.items()} for metrics in told]


def losses(told: list[dict[str, Any]]) -> list[float]:
    return [metrics["loss"] for metrics in told]


def parameters(engine: Any) -> dict[str, np.ndarray]:
    return {path: np.array(x) for path, x in engine.parameters.items()}


def assert_bitwise_equal(ours: Any, theirs: Any) -> None:
    """All of two engines' states."""

    def leaves(engine: Any) -> list[np.ndarray]:
        arrays = jax.tree.leaves(engine.state)
        is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
        return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in arrays]

    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def bytes_by_device(of: list[Any] | None = None) -> Counter[jax.Device]:
    """Bytes of live arrays: of buffers, because an array and its shard share one."""
    if of is None:
        gc.collect()
        of = jax.live_arrays()
    buffers = {}
    for x in of:
        x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for shard in x.addressable_shards:
            buffers[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    found: Counter[jax.Device] = Counter()
    for (device, _), nbytes in buffers.items():
        found[device] += nbytes
    return found
