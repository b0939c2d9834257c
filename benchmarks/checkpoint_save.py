"""Blocking time of a checkpoint save, compared with one copy of the state to host memory.

    python benchmarks/checkpoint_save.py [--million 32] [--pairs 7] [--stage 3] [--json]

On eight simulated devices, or on whatever devices there are. Each pair copies what a checkpoint
keeps into new NumPy arrays, each element once, and saves, which goes first by turns; the state is
at rest before each. Then the rest of the save's cost: the time until it is sealed, and how much
slower training steps are in that time.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import jaxspeed
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.checkpoint.leaves import saved_arrays
from jaxspeed.user_models.rng import is_key

WIDTH, ROWS = 1024, 64


def engine_of(million: int, stage: int) -> Any:
    """Layers of one million fp32 parameters each, with Adam's moments."""

    def init(key: jax.Array) -> Any:
        return [jax.random.normal(key, (WIDTH, WIDTH)) / 32 for _ in range(million)]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return x

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["x"]) - batch["x"]).mean()

    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    return jaxspeed.initialize((init, apply), loss, config)


def copied(engine: Any) -> list[np.ndarray]:
    """A copy of each element that a checkpoint saves, in separate memory."""
    return [
        np.array(shard.data, copy=True)
        for x in saved_arrays(engine.program, engine.state).values()
        if not is_key(x)
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def seconds(function: Any) -> float:
    start = time.perf_counter()
    kept = function()
    taken = time.perf_counter() - start
    del kept
    return taken


def measure(million: int, pairs: int, stage: int, folder: Path) -> dict[str, float]:
    engine = engine_of(million, stage)
    batch = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}
    engine.train_batch(batch)
    engine.wait()
    saver = Checkpointer(folder, keep=1)
    saves, copies, sealed = [], [], []

    def save() -> None:
        start = time.perf_counter()
        saver.save(engine.program, engine.state)
        saves.append(time.perf_counter() - start)
        saver.wait()
        sealed.append(time.perf_counter() - start)

    for pair in range(pairs + 1):
        for which in (0, 1) if pair % 2 else (1, 0):
            if which:
                save()
            else:
                copies.append(seconds(lambda: copied(engine)))
    saves, copies, sealed = saves[1:], copies[1:], sealed[1:]  # the first of each compiles, warms

    def steps(until: Any) -> float:
        start, count = time.perf_counter(), 0
        while count < 3 or not until():
            float(engine.train_batch(batch)["loss"])
            count += 1
        return (time.perf_counter() - start) / count

    alone = steps(lambda: True)
    saver.save(engine.program, engine.state)
    beside = steps(lambda: saver._thread is None or not saver._thread.is_alive())
    saver.close()
    nbytes = sum(x.nbytes for x in copied(engine))
    return {
        "gigabytes": nbytes / 1e9,
        "save_blocks_seconds": statistics.median(saves),
        "copy_to_host_seconds": statistics.median(copies),
        "ratio": statistics.median(a / b for a, b in zip(saves, copies, strict=True)),
        "sealed_after_seconds": statistics.median(sealed),
        "step_alone_seconds": alone,
        "step_while_writing_seconds": beside,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", type=int, default=32, help="parameters, in millions")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        found = measure(given.million, given.pairs, given.stage, folder)
    finally:
        shutil.rmtree(folder)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28s} {value:8.3f}")


if __name__ == "__main__":
    main()
