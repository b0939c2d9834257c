"""The engine's step against a hand-written one: time, flops and bytes of the compiled programs.

    python benchmarks/step_overhead.py [--pairs 40] [--json]

Five cases: one device; eight simulated devices with everything replicated (stage 0); the same with
four micro-batches; with the state sharded (stage 3 against FSDP as `jax.jit` gives it); and with
weights sharded over a tensor axis of 2 (against shardings written by hand on the same mesh). Each
pair times both steps one after the other on the same batch, alternating which goes first. Reported
is the median of the ratios engine / reference with a bootstrap's upper 95% bound.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import reference_step as reference

import jaxspeed
from jaxspeed import models
from jaxspeed.hlo import CompiledReport, report

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
}
BATCH, SEQ = 32, 128
LEARNING_RATE, CLIP = 1e-3, 1.0
WARM_UP = 4


class Case(NamedTuple):
    name: str
    devices: int
    stage: int
    accumulation: int = 1
    tensor: int = 1


CASES = (
    Case("1 device", 1, 0),
    Case("8 devices, stage 0", 8, 0),
    Case("8 devices, stage 0, 4 micro-batches", 8, 0, 4),
    Case("8 devices, stage 3", 8, 3),
    Case("8 devices, tensor 2", 8, 0, tensor=2),
)


class Runner(NamedTuple):
    """A step with its state, and its compiled program's report."""

    run: Callable[[], Any]
    compiled: CompiledReport


def engine_runner(case: Case, built: Any, batch: Any) -> Runner:
    """The public API: train_batch on a batch that is already on the devices."""
    engine = jaxspeed.initialize(
        model=built.factory,
        loss_fn=built.loss,
        config={
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": case.accumulation,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": {"stage": case.stage},
            "mesh": {"tensor": case.tensor},
            "run": {"compilation_cache": False},
        },
        devices=jax.devices()[: case.devices],
    )
    placed = jax.device_put(batch, engine.program.batch_shardings(batch))
    return Runner(lambda: engine.train_batch(placed), engine.compiled(batch))


def reference_runner(case: Case, built: Any, batch: Any) -> Runner:
    """The hand-written `reference_step`."""
    tx = reference.optimizer(LEARNING_RATE, CLIP)
    devices = jax.devices()[: case.devices]
    if case.devices == 1:
        state, step = reference.single_device(built.factory, built.loss, tx, case.accumulation)
        placed = jax.device_put(batch, devices[0])
    elif case.tensor > 1:
        state, step, at = reference.tensor_parallel(
            built.factory, built.loss, tx, devices, case.tensor
        )
        placed = jax.device_put(batch, at)
    else:
        state, step, at = reference.data_parallel(
            built.factory, built.loss, tx, devices, case.accumulation, case.stage == 3
        )
        placed = jax.device_put(batch, at)
    shape = (case.devices // case.tensor, case.tensor)
    mesh = jax.make_mesh(shape, ("data", "tensor"), devices=devices)
    compiled = report(step.lower(state, placed).compile(), mesh)  # type: ignore[attr-defined]
    held = [state]

    def run() -> Any:
        held[0], metrics = step(held[0], placed)
        return metrics

    return Runner(run, compiled)


def seconds(runner: Runner) -> float:
    start = time.perf_counter()
    jax.block_until_ready(runner.run())
    return time.perf_counter() - start


def upper_bound(ratios: list[float], draws: int = 4000) -> float:
    """The 95th percentile of the median, by bootstrap."""
    rng = np.random.default_rng(0)
    samples = rng.choice(ratios, size=(draws, len(ratios)))
    return float(np.quantile(np.median(samples, axis=1), 0.95))


def measure(case: Case, pairs: int) -> dict[str, Any]:
    built = models.build("gpt2", None, SIZES)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (BATCH, SEQ + 1))
    batch = {"tokens": tokens.astype(np.int32)}
    ours, theirs = engine_runner(case, built, batch), reference_runner(case, built, batch)
    for _ in range(WARM_UP):
        seconds(ours), seconds(theirs)
    times: list[tuple[float, float]] = []
    for i in range(pairs):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        times.append((a, b) if i % 2 else (b, a))
    ratios = [a / b for a, b in times]
    return {
        "case": case.name,
        "pairs": pairs,
        "engine_ms": 1e3 * statistics.median(a for a, _ in times),
        "reference_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "upper_95": upper_bound(ratios),
        "flops_ratio": ours.compiled.flops / theirs.compiled.flops,
        "bytes_ratio": ours.compiled.bytes_accessed / theirs.compiled.bytes_accessed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="one JSON object a case")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this case")
    arguments = parser.parse_args()
    cases = CASES if arguments.case is None else [CASES[arguments.case]]
    print(f"jax {jax.__version__}, python {sys.version.split()[0]}, {os.cpu_count()} cores")
    for case in cases:
        found = measure(case, arguments.pairs)
        if arguments.json:
            print(json.dumps(found))
            continue
        print(
            f"{found['case']}: {found['engine_ms']:.1f} ms against {found['reference_ms']:.1f} ms, "
            f"ratio {found['ratio']:.3f} (upper 95% {found['upper_95']:.3f}, {found['pairs']} "
            f"pairs), flops x{found['flops_ratio']:.4f}, bytes x{found['bytes_ratio']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
