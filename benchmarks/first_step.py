"""From `initialize` to the end of the first step, cold: the engine against a hand-written program.

    python benchmarks/first_step.py [--rounds 3] [--layers 24] [--only zero3 ...] [--json]

The model is a list of unrolled transformer blocks of width 32. The yardstick is a plain program for
one device, its initialization included: Flax creates the parameters outside of jit, and one jitted
step holds the loss, its gradients and AdamW. Each run is a process of its own on eight simulated
devices, without a compilation cache; rounds alternate between plain and engine. Reported are the
medians in seconds, and the median of the ratios of each round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

WIDTH, HEADS, VOCAB, SAMPLES, SEQ = 32, 4, 128, 16, 32
ENGINES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "tensor": {"mesh": {"tensor": 2}, "train_micro_batch_size_per_gpu": 4},
    "remat": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "parallel": {"remat": "full"},
    },
    "pipe": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
}
BOUNDS = {name: 3.0 if name == "pipe" else 2.0 for name in ENGINES}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        q, k, v = (
            each(h).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
            for each in (self.query, self.key, self.value)
        )
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses.mean()


def batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (SAMPLES, SEQ + 1))
    return {"tokens": tokens.astype(np.int32)}


def plain(layers: int) -> Callable[[], float]:
    """The hand-written program: what has to be done before and in the first step."""

    def run() -> float:
        graph, params, rest = nnx.split(Decoder(layers, nnx.Rngs(0)), nnx.Param, ...)
        tx = optax.adamw(1e-3)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            def value(params: Any) -> jax.Array:
                return loss(nnx.merge(graph, params, rest), batch)

            first, grads = jax.value_and_grad(value)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, first

        return float(step(params, tx.init(params), batch())[2])

    return run


def engine(layers: int, config: dict[str, Any]) -> Callable[[], float]:
    import jaxspeed

    full = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-4}},
        "run": {"compilation_cache": False},
        **config,
    }

    def run() -> float:
        made = jaxspeed.initialize(
            lambda rngs: Decoder(layers, rngs), loss, config=full, example_batch=batch()
        )
        return float(made.train_batch(batch())["loss"])

    return run


def measure(name: str, layers: int) -> dict[str, float]:
    """Wall and CPU seconds, in this process."""
    jax.config.update("jax_enable_compilation_cache", False)
    jax.devices()
    run = plain(layers) if name == "plain" else engine(layers, ENGINES[name])
    wall, cpu = time.perf_counter(), time.process_time()
    first = run()
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "loss": first,
    }


def in_a_process(name: str, layers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, "--layers", str(layers)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.layers)))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("plain", *args.only)}
    for _ in range(args.rounds):
        for name, found in runs.items():
            found.append(in_a_process(name, args.layers))
    result = {}
    for name, found in runs.items():
        ratios = [a["wall"] / b["wall"] for a, b in zip(found, runs["plain"], strict=True)]
        result[name] = {
            "wall": statistics.median(each["wall"] for each in found),
            "cpu": statistics.median(each["cpu"] for each in found),
            "ratio": statistics.median(ratios),
            "loss": found[0]["loss"],
        }
    if args.json:
        print(json.dumps(result))
        return
    for name, row in result.items():
        bound = f" (at most {BOUNDS[name]})" if name in BOUNDS else ""
        print(
            f"{name:8} {row['wall']:6.1f} s, CPU {row['cpu']:6.1f} s, "
            f"{row['ratio']:.2f} times plain{bound}, loss {row['loss']:.4f}"
        )


if __name__ == "__main__":
    main()
