"""Tokens per second on a CPU, of jaxspeed and its peers at the same work.

    pip install -e '.[bench]'
    python benchmarks/peers_cpu.py [--cores 2] [--rounds 5] [--steps 10] [--only jaxspeed ...]

All train one GPT-2 (6 x 384, 6 heads, a tied head, vocabulary 8192) in fp32 with AdamW on 8 x 256
tokens a step, without clipping or dropout, from the same weights on the same batches: the losses of
the first steps are compared. Each is a process of its own on the same cores (with several ranks, a
group of processes), and the rounds are interleaved. A step is timed until its loss is on the host.
Reported are the medians of the rounds, which are medians of their steps, and their range.

`jaxspeed train` restarts itself with glibc's setting for huge pages; jaxspeed's processes have it
here too, or those with which glibc keeps the memory of temporary arrays. The peers' have those
that --peers-memory names: `default`, none, as they start by themselves; `huge`, pages; `kept`, the
same as jaxspeed's with kept temporaries.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from peers_jax import plain_jax_step
from peers_torch import torch_step
from peers_work import Step, Work, batches, save_weights

WORK = Work()
WARM_UP = 4
COMPARED = 3  # losses of the first steps
# Arenas of four pages of 1 GB, where 64 MB is usual: large blocks come from them, and they are not
# trimmed. No page of 1 GB has to be reserved.
KEEP_TEMPORARIES = (
    "glibc.malloc.hugetlb=1073741824:"
    "glibc.malloc.mmap_threshold=4294967295:"
    "glibc.malloc.trim_threshold=17179869184"
)


def jaxspeed_step(
    weights: str, devices: int, unroll: int | bool = True, stage: int = 0, parts: int = 1
) -> Step:
    """The shipped model and the public interface."""
    import jaxspeed
    from jaxspeed import models

    jaxspeed.simulate(devices)
    sizes = {
        "hidden_size": WORK.width,
        "num_hidden_layers": WORK.layers,
        "num_attention_heads": WORK.heads,
        "vocab_size": WORK.vocab,
        "max_position_embeddings": WORK.seq,
        "unroll": unroll,
    }
    built = models.build("gpt2", None, sizes)
    config = {
        "train_batch_size": WORK.batch,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": WORK.rate, "weight_decay": WORK.decay}},
        "zero_optimization": {"stage": stage},
        "parallel": {"batch_parts": parts},
        "run": {"compilation_cache": False},
    }
    engine = jaxspeed.initialize(model=built.factory, loss_fn=built.loss, config=config)
    if not os.path.exists(weights):
        save_weights(weights, engine.parameters)
    return lambda tokens: engine.train_batch({"tokens": tokens})["loss"]


# -- runs ------------------------------------------------------------------------------------------


def competitors(cores: int) -> dict[str, tuple[int, Callable[[str], Step]]]:
    """By name: processes, and the step of each."""
    n = cores
    one: dict[str, Callable[[str], Step]] = {
        "jaxspeed, 1 device": lambda w: jaxspeed_step(w, 1),
        "jaxspeed, 1 device, 2 parts": lambda w: jaxspeed_step(w, 1, parts=2),
        "jaxspeed, 1 device, 2 parts, kept": lambda w: jaxspeed_step(w, 1, parts=2),
        "jaxspeed, 1 device, scanned": lambda w: jaxspeed_step(w, 1, unroll=1),
        "plain JAX and Optax": lambda w: plain_jax_step(w, WORK, scanned=False),
        "torch": lambda w: torch_step(w, WORK, n),
        "torch, compiled": lambda w: torch_step(w, WORK, n, compiled=True),
    }
    if n == 1:
        return {name: (1, make) for name, make in one.items()}
    several: dict[str, Callable[[str], Step]] = {
        f"torch DDP, {n} processes": lambda w: torch_step(w, WORK, 1, sharding="ddp"),
        f"torch DDP, {n} processes, compiled": lambda w: torch_step(w, WORK, 1, True, "ddp"),
        f"torch FSDP2, {n} processes": lambda w: torch_step(w, WORK, 1, sharding="fsdp2"),
        f"DeepSpeed ZeRO 1, {n} processes": lambda w: torch_step(w, WORK, 1, sharding="deepspeed"),
    }
    one |= {
        f"jaxspeed, {n} devices": lambda w: jaxspeed_step(w, n),
        f"jaxspeed, {n} devices, scanned": lambda w: jaxspeed_step(w, n, unroll=1),
        f"jaxspeed, {n} devices, ZeRO 1": lambda w: jaxspeed_step(w, n, stage=1),
    }
    found = {name: (1, make) for name, make in one.items()}
    return found | {name: (n, make) for name, make in several.items()}


def run_here(make: Callable[[str], Step], weights: str, steps: int) -> None:
    """Print the seconds of each step, and the first losses."""
    step, seconds, losses = make(weights), [], []
    for tokens, _ in zip(batches(WORK), range(WARM_UP + steps)):
        start = time.perf_counter()
        losses.append(float(step(tokens)))
        seconds.append(time.perf_counter() - start)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"seconds": seconds[WARM_UP:], "losses": losses[:COMPARED]}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # without the teardown of process groups, which may wait for each other


def run_apart(name: str, processes: int, weights: str, arguments: Any, port: int) -> Any:
    """One run in processes of its own; None if it fails."""
    command = [sys.executable, __file__, "--run", name, "--weights", weights]
    command += ["--cores", str(arguments.cores), "--steps", str(arguments.steps)]
    group = []
    for rank in range(processes):
        environment = os.environ | {
            # DeepSpeed compiles its communication with the ninja that pip installed.
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": str(arguments.cores // processes),
            "DS_ACCELERATOR": "cpu",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLIBC_TUNABLES": glibc_settings(name, arguments.peers_memory),
        }
        if processes == 1:  # jaxspeed would join the others
            for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(key)
        pipe = subprocess.PIPE
        group.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    outputs = [each.communicate() for each in group]
    lines = [line for line in outputs[0][0].splitlines() if line.startswith('{"seconds"')]
    if not lines:
        last = (outputs[0][1].strip().splitlines() or ["no message"])[-1]
        print(f"{name}: failed: {last}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def glibc_settings(name: str, of_peers: str) -> str:
    from jaxspeed.cli.train import HUGE_PAGES

    if name.startswith("jaxspeed"):
        return KEEP_TEMPORARIES if name.endswith("kept") else HUGE_PAGES
    return {"default": "", "huge": HUGE_PAGES, "kept": KEEP_TEMPORARIES}[of_peers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=2, help="the first of those allowed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed ones per run")
    parser.add_argument("--only", nargs="+", default=[], help="names that contain one of these")
    parser.add_argument("--peers-memory", choices=("default", "huge", "kept"), default="default")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    every = competitors(arguments.cores)
    if arguments.run:
        run_here(every[arguments.run][1], arguments.weights, arguments.steps)
    chosen = {
        name: processes
        for name, (processes, _) in every.items()
        if not arguments.only or any(part in name for part in arguments.only)
    }
    rates: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "weights.safetensors")
        first = argparse.Namespace(cores=arguments.cores, steps=0, peers_memory="default")
        run_apart("jaxspeed, 1 device", 1, weights, first, 0)
        for number in range(arguments.rounds):
            for i, (name, processes) in enumerate(chosen.items()):
                port = 20000 + (os.getpid() + 101 * number + i) % 20000
                found = run_apart(name, processes, weights, arguments, port)
                if found is None:
                    continue
                rate = WORK.batch * WORK.seq / statistics.median(found["seconds"])
                rates.setdefault(name, []).append(rate)
                losses[name] = found["losses"]
                print(f"round {number + 1}: {name}: {rate:.0f}", file=sys.stderr, flush=True)
    report(rates, losses)


def report(rates: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    reference = next(iter(losses.values()))
    print(f"\n| tokens/s, median of {max(map(len, rates.values()))} rounds | | range | losses |")
    print("|---|---|---|---|")
    for name, found in sorted(rates.items(), key=lambda pair: -statistics.median(pair[1])):
        off = max(abs(a - b) / b for a, b in zip(losses[name], reference, strict=True))
        spread = f"{min(found):,.0f} to {max(found):,.0f}"
        print(f"| {name} | {statistics.median(found):,.0f} | {spread} | within {off:.0e} |")
    ours = max((statistics.median(r) for n, r in rates.items() if "jaxspeed" in n), default=0)
    theirs = [
        statistics.median(r) for n, r in rates.items() if n.startswith(("torch", "DeepSpeed"))
    ]
    if ours and theirs:
        print(f"\nthe best jaxspeed is {ours / max(theirs):.2f}x the best of torch and DeepSpeed")


if __name__ == "__main__":
    main()
