"""Pipeline step time compared with data parallelism, with the same recomputation.

    python benchmarks/pipeline_step.py [--pairs 20] [--schedule 1f1b] [--json]

pipe 4 x data 2 against data 8, on eight simulated devices: one model, one global batch, as many
samples of a micro-batch on a device. A stage saves its input and makes the rest again, so the data
ranks' model recomputes the layers of a stage at a time. Each pair times both steps one after the
other, which goes first by turns; what is quoted is the median of the ratios pipeline / data, by
itself and divided by what the bubble costs, (v M + K - 1) / (v M).
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from flax import nnx
from jax import lax
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed import models

STAGES, RANKS, MICRO_BATCHES, MICRO, SEQ, LAYERS, VOCABULARY = 4, 2, 16, 2, 128, 8, 2048
SAMPLES = RANKS * MICRO_BATCHES * MICRO
WARM_UP = 2


def recomputed(blocks: nnx.Module, x: jax.Array, *args: object, unroll: object = 1) -> jax.Array:
    """As `models.layers.scan_blocks`, the layers of a stage recomputed together."""
    del unroll
    graphdef, params, rest = nnx.split(blocks, nnx.Param, ...)

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graphdef, *layer)(x, *args), None  # type: ignore[operator]

    def stage(x: jax.Array, layers: Any) -> tuple[jax.Array, None]:
        return lax.scan(block, x, layers)

    grouped = jax.tree.map(lambda w: w.reshape(STAGES, -1, *w.shape[1:]), (params, rest))
    return lax.scan(jax.checkpoint(stage, prevent_cse=False), x, grouped)[0]


def engine(hidden: int, piped: bool, schedule: str) -> Any:
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": SEQ,
    }
    scan = gpt2.scan_blocks
    gpt2.scan_blocks = scan if piped else recomputed  # type: ignore[attr-defined]
    built = models.build("gpt2", None, sizes)
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": MICRO,
        "mesh": {"pipe": STAGES, "data": RANKS} if piped else {"data": STAGES * RANKS},
        "parallel": {"pipeline_schedule": schedule} if piped else {},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "run": {"compilation_cache": False},
    }
    made = jaxspeed.initialize(built.factory, built.loss, config)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES, SEQ + 1))
    batch = made.program.abstract_batch({"tokens": jax.ShapeDtypeStruct(tokens.shape, np.int32)})
    at = jax.tree.map(lambda x: x.sharding, batch)
    made.batch = jax.device_put({"tokens": tokens.astype(np.int32)}, at)  # type: ignore[attr-defined]
    for _ in range(WARM_UP):
        seconds(made)
    gpt2.scan_blocks = scan  # type: ignore[attr-defined]
    return made


def seconds(made: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(made.train_batch(made.batch)["loss"])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b", "interleaved"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    ours, theirs = (engine(arguments.hidden, piped, arguments.schedule) for piped in (True, False))
    times: list[tuple[float, float]] = []
    for i in range(arguments.pairs):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        times.append((a, b) if i % 2 else (b, a))
    ratios = sorted(a / b for a, b in times)
    units = MICRO_BATCHES * (2 if arguments.schedule == "interleaved" else 1)
    bubble = (units + STAGES - 1) / units
    found = {
        "pipeline_ms": 1e3 * statistics.median(a for a, _ in times),
        "data_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "spread": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "bubble": bubble,
        "adjusted": statistics.median(ratios) / bubble,
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"jax {jax.__version__}, python {sys.version.split()[0]}, {os.cpu_count()} cores")
    print(
        f"{arguments.schedule}: {found['pipeline_ms']:.0f} ms against {found['data_ms']:.0f} ms, "
        f"ratio {found['ratio']:.3f} (quartiles {ratios[len(ratios) // 4]:.3f}, "
        f"{ratios[3 * len(ratios) // 4]:.3f}), of which the bubble is {bubble:.3f}: "
        f"{found['adjusted']:.3f} without it"
    )


if __name__ == "__main__":
    main()
