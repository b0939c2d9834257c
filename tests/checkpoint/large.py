"""A checkpoint of 1.0 billion parameters, and its export: `-m tests.checkpoint.large MODE FOLDER`.

MODE is `write` or `export`; the latter prints by how much its memory grew, as JSON.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

SHAPES = {"embedding": (128_256, 2048), **{f"layer{i:02d}": (2048, 8192) for i in range(44)}}
PERIOD = 1 << 20  # whole numbers that fp32 has


def element(row: Any, column: Any, columns: int) -> Any:
    return (row * (columns + 7) + column) % PERIOD


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {
        name: element(jnp.arange(r)[:, None], jnp.arange(c), c).astype(jnp.float32)
        for name, (r, c) in SHAPES.items()
    }


def loss(model: Any, batch: Any) -> jax.Array:
    return model(batch["x"]).mean()


def write(folder: Path) -> None:
    import jaxspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine = jaxspeed.initialize((init, lambda params, x: x), loss, config)
    engine.save_checkpoint(folder / "checkpoints")
    engine.close()


def export(folder: Path) -> None:
    from jaxspeed.checkpoint import show
    from jaxspeed.interop import export

    tag = show(folder / "checkpoints").tag
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(folder / "checkpoints", folder / "out", tag=tag)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"runtime": before << 10, "grown": (after - before) << 10}))


if __name__ == "__main__":
    {"write": write, "export": export}[sys.argv[1]](Path(sys.argv[2]))
