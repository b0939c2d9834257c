"""Runs with a parameter server, and the same as data parallelism: four devices compute in both."""

import gc
from collections import Counter
from typing import Any

import jax
import numpy as np
from flax import nnx

from tests.engine import tiny

RANKS, SERVERS, MICRO = 4, 2, 2
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
BF16 = {"bf16": {"enabled": True}}
DROP = {"max_staleness": 4, "on_stale": "drop"}
WAIT = {"max_staleness": 4, "on_stale": "wait"}
SLOWED = [1.0, 1.0, 1.0, 5.0]
RULE = ("max_staleness", "on_stale", "staleness_decay", "worker_pace")


class Small(nnx.Module):
    """Few leaves, which two servers divide but for a bias of one number."""

    def __init__(self, rngs: nnx.Rngs):
        self.input = nnx.Linear(tiny.FEATURES, tiny.HIDDEN, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([tiny.Block(rngs)])
        self.head = nnx.Linear(tiny.HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small_by_hand(params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What `Small` computes."""
    h = x @ params["input/kernel"]
    h = h + np.tanh(h @ params["blocks/0/linear/kernel"] + params["blocks/0/linear/bias"])
    return (h @ params["head/kernel"] + params["head/bias"])[:, 0]


def served(
    servers: int = SERVERS, *, ranks: int = RANKS, accumulation: int = 1, model: Any = Small,
    loss_fn: Any = tiny.squared_error, parallel: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """`parallel` are words beside `servers`."""
    words = {"data_reduction": "parameter_server", "servers": servers, **(parallel or {})}
    engine = _engine(ranks + servers, accumulation, model, loss_fn, parallel=words, **more)
    beside_rule = {name: x for name, x in words.items() if name not in RULE}
    share_programs(engine, (ranks, accumulation, model, loss_fn, beside_rule, more))
    return engine


_PROGRAMS: list[tuple[Any, dict[str, Any]]] = []


def share_programs(engine: Any, built_from: Any) -> None:
    """The compiled functions of the first engine that is built from equal arguments.

    Their schedule, in which alone these engines differ, is no part of them.
    """
    names = ("server", "worker_steps")
    for given, programs in _PROGRAMS:
        if given == built_from:
            engine.program.__dict__.update(programs)
            return
    _PROGRAMS.append((built_from, {name: getattr(engine.program, name) for name in names}))


def data_parallel(
    *, accumulation: int = 1, model: Any = Small, loss_fn: Any = tiny.squared_error,
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
