"""Seconds of a compiled plan as a command: Llama 3 8B for `v5p:4x4x4`, without a TPU.

2 x 4096 tokens per device, full remat, ZeRO 3 over 64. Each round is a process of its own; medians
and ranges of wall and CPU time, and of the wall time without XLA's compile. `--maxtext PYTHON`,
the interpreter of an environment with MaxText (0.2.5 needs Python 3.12), alternates with MaxText's
ahead-of-time compile of the same step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

CHANGES = (
    "train_micro_batch_size_per_gpu=2",
    "gradient_accumulation_steps=1",
    "parallel.remat=full",
)
PLAN = [sys.executable, "-m", "jaxspeed", "plan", "configs/llama3_8b.yaml"]
PLAN += ["--target", "v5p:4x4x4", "--compile", "--json"]
PLAN += [word for change in CHANGES for word in ("--set", change)]
MAXTEXT = """
import os, runpy, sys, maxtext
base = os.path.join(list(maxtext.__path__)[0], "configs", "base.yml")
sys.argv[1:1] = [base]
runpy.run_module("maxtext.trainers.pre_train.train_compile", run_name="__main__")
"""
KEYS = (
    "model_name=llama3.1-8b",
    "compile_topology=v5p-128",  # its name for 64 chips
    "compile_topology_num_slices=1",
    "ici_fsdp_parallelism=64",
    "per_device_batch_size=2",
    "max_target_length=4096",
    "remat_policy=full",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "jax_cache_dir=",  # else a second round would load the first one's step
)
OFFLINE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def timed(command: list[str], folder: str | None = None) -> tuple[float, float, str]:
    """Wall and CPU seconds of a command with its child processes, and what it printed."""
    start, before = time.perf_counter(), os.times()
    env = {**os.environ, **OFFLINE} if folder else None
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stderr[-2000:]}")
    used = after.children_user - before.children_user
    return wall, used + after.children_system - before.children_system, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--maxtext", metavar="PYTHON")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    ratios = []
    for _ in range(given.rounds):
        wall, cpu, printed = timed(PLAN)
        compiled = json.loads(printed)["compiled"]
        seconds.setdefault("jaxspeed plan --compile, wall", []).append(wall)
        seconds.setdefault("  CPU", []).append(cpu)
        seconds.setdefault("  without XLA's compile, wall", []).append(
            wall - compiled["compile_seconds"]
        )
        if given.maxtext:
            with tempfile.TemporaryDirectory() as folder:
                peer, cpu, _ = timed([given.maxtext, "-c", MAXTEXT, *KEYS], folder)
            seconds.setdefault("MaxText train_compile, wall", []).append(peer)
            seconds.setdefault("  CPU ", []).append(cpu)
            ratios.append(wall / peer)
    for name, values in seconds.items():
        low, high = min(values), max(values)
        print(f"{name:36} {statistics.median(values):6.1f}  ({low:.1f} to {high:.1f})")
    if ratios:
        print(f"ratio of wall times {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
