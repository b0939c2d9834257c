"""Steps on the attached GPU: time and memory, beside what `jaxspeed plan` estimates for it.

    python benchmarks/gpu_step.py [--target h100:1] [--only gpt2 llama ...] [--steps 10] [--json]

Each case is a process of its own, with random tokens. Reported are the median time of a step, the
memory that the compiler asks for (arguments and temp), the peak of the allocator, and the estimates
of the same config for the target, made without a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

BASE = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "run": {"steps": 100},
}
LLAMA = {  # 1.2 billion parameters, as Llama 3.2 1B
    "family": "llama",
    "config": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32768,
    },
}
GPT2 = {"family": "gpt2", "preset": "gpt2", "config": {"vocab_size": 50304}}
GPT2_XL = {"family": "gpt2", "preset": "gpt2-xl", "config": {"vocab_size": 50304}}
HOST = {"device": "cpu"}


def case(model: Any, seq: int, micro: int, packed: bool = False, **sections: Any) -> Any:
    data = {"source": "stdlib", "tokenizer": "bytes", "seq_len": seq, "document_masks": packed}
    return {
        **BASE,
        "model": model,
        "data": data,
        "train_micro_batch_size_per_gpu": micro,
        **sections,
    }


CASES = {
    "gpt2": case(GPT2, 1024, 16),
    "gpt2, remat": case(GPT2, 1024, 32, parallel={"remat": "full"}),
    "gpt2-xl": case(GPT2_XL, 1024, 8, parallel={"remat": "attention"}),
    "gpt2-xl, moments offloaded": case(
        GPT2_XL,
        1024,
        8,
        parallel={"remat": "attention"},
        zero_optimization={"offload_optimizer": HOST},
    ),
    "llama": case(LLAMA, 4096, 4, parallel={"remat": "attention"}),
    "llama, packed": case(LLAMA, 4096, 4, packed=True, parallel={"remat": "attention"}),
}
NO_GPU = "needs an NVIDIA GPU and jaxspeed[cuda]"
DOCUMENT = 700  # tokens of a packed document, about


def batch_of(name: str, rows: int, seq: int, vocabulary: int) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, vocabulary, (rows, seq + 1)).astype(np.int32)}
    if "packed" in name:
        starts = rng.random((rows, seq + 1)) < 1 / DOCUMENT
        batch["segment_ids"] = 1 + np.cumsum(starts, axis=1).astype(np.int32)
    return batch


def measure(name: str, steps: int) -> dict[str, Any]:
    import jax

    import jaxspeed

    try:
        jax.devices()
    except (AssertionError, RuntimeError):  # the first from jax 0.10 without its CUDA plugin
        return {"failed": NO_GPU}
    config = CASES[name]
    begun = time.perf_counter()
    engine = jaxspeed.initialize(config=config)
    given = config["model"]["config"]["vocab_size"]
    batch = batch_of(name, engine.program.batch.train, config["data"]["seq_len"], given)
    losses = [float(engine.train_batch(batch)["loss"])]
    first = time.perf_counter() - begun
    losses += [float(engine.train_batch(batch)["loss"]) for _ in range(2)]
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        losses.append(float(engine.train_batch(batch)["loss"]))
        seconds.append(time.perf_counter() - begun)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    report = engine.compiled(batch)
    return {
        "device": jax.devices()[0].device_kind,
        "first_step_seconds": first,
        "step_seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "tokens": batch["tokens"][:, 1:].size,
        "compiled_bytes": report.argument_bytes + report.temp_bytes,
        "argument_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "host_bytes": report.host_bytes,
        "peak_bytes": peak,
        "losses": [losses[0], losses[-1]],
    }


def estimate(name: str, target: str) -> dict[str, Any]:
    import jaxspeed

    figures = jaxspeed.plan(CASES[name], target).figures()
    return {"memory": figures["memory"], "time": figures["time"]}


def in_child(kind: str, name: str, args: Any, platform: str) -> dict[str, Any]:
    more = ["--steps", str(args.steps), "--target", args.target]
    try:
        done = subprocess.run(
            [sys.executable, __file__, kind, name, *more],
            env=os.environ | {"JAX_PLATFORMS": platform},
            capture_output=True,
            text=True,
            timeout=args.patience,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {args.patience:g} s"}
    if done.returncode:
        return {"failed": done.stderr[-3000:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="h100:1")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--patience", type=float, default=300, help="seconds a case")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--estimate", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.steps)))
        return
    if args.estimate:
        print(json.dumps(estimate(args.estimate, args.target)))
        return
    for name in args.only:
        found = in_child("--measure", name, args, "cuda")
        if found.get("failed") == NO_GPU:
            print(f"benchmarks/gpu_step.py: {NO_GPU}")
            return
        planned = in_child("--estimate", name, args, "cpu")
        if args.json:
            print(json.dumps({"case": name, "measured": found, "estimated": planned}))
        else:
            print(row(name, found, planned))
        sys.stdout.flush()


def row(name: str, found: dict[str, Any], planned: dict[str, Any]) -> str:
    failed = [what["failed"] for what in (found, planned) if "failed" in what]
    if failed:
        return f"{name}: {failed[0]}"
    seconds, expected = found["step_seconds"], planned["time"]["step"]
    mfu = planned["time"]["mfu"] * expected / seconds
    size, guessed = found["compiled_bytes"] / 1e9, planned["memory"]["device"] / 1e9
    return (
        f"{name:28} {found['tokens'] / seconds:9,.0f} tokens/s  MFU {mfu:.1%}  "
        f"{1e3 * seconds:7.1f} ms "
        f"({1e3 * found['least']:.1f} to {1e3 * found['most']:.1f}), estimated "
        f"{1e3 * expected:7.1f} ({expected / seconds:.2f})  {size:6.2f} GB compiled, peak "
        f"{(found['peak_bytes'] or 0) / 1e9:.2f}, estimated {guessed:6.2f} ({guessed / size:.2f})"
    )


if __name__ == "__main__":
    main()
