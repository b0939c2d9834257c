"""Mixtures of experts compiled for absent devices: bytes per device, and seconds of a plan.

Mixtral-8x7B for `v6e:16x16` with the settings of MaxText's compile (4 x 1,024 tokens a device, fp32
master and Adam, full remat, fsdp 256 or fsdp 32 x expert 8), beside its figures; for `v5p:4x4x4` at
2 x 4,096. DeepSeek-V3, 671 B parameters, at 1 x 4,096 with 32 or more expert shards for
`v5p:8x8x8` and `h100:1024`, each planned and compiled in less than 4 minutes. Each is a `jaxspeed
plan` in a process of its own; GPUs need `--cuda PYTHON`, the interpreter of an environment with
jaxspeed[cuda].

    python benchmarks/mixtures_compile.py [--only mixtral] [--cuda PYTHON]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

LIMIT = 240.0  # seconds of a plan of DeepSeek-V3
MOST_TEMP, MOST_ARGUMENT = 0.8, 1.01  # of MaxText's


@dataclass(frozen=True)
class Case:
    """A plan; `peer` are MaxText's bytes of arguments and temporaries (megablox, dropless)."""

    config: str
    target: str
    sets: tuple[str, ...]
    peer: tuple[float, float] | None = None
    limited: bool = False


def tokens(samples: int, seq: int) -> tuple[str, ...]:
    return f"train_micro_batch_size_per_gpu={samples}", f"data.seq_len={seq}"


CASES = {
    "mixtral, data 256": Case(
        "mixtral_8x7b", "v6e:16x16", (*tokens(4, 1024), "mesh.expert=1"), (2.19e9, 6.67e9)
    ),
    "mixtral, data 32 x expert 8": Case(
        "mixtral_8x7b", "v6e:16x16", (*tokens(4, 1024), "mesh.expert=8"), (2.19e9, 7.44e9)
    ),
    "mixtral, data 8 x expert 8": Case("mixtral_8x7b", "v5p:4x4x4", tokens(2, 4096)),
    "deepseek, data 16 x expert 32": Case(
        "deepseek_v3", "v5p:8x8x8", (*tokens(1, 4096), "mesh.expert=32"), limited=True
    ),
    "deepseek, data 16 x expert 64": Case(
        "deepseek_v3", "h100:1024", (*tokens(1, 4096), "mesh.expert=64"), limited=True
    ),
}


def planned(case: Case, python: str) -> tuple[float, float, dict]:
    """(wall and CPU seconds, the plan) of a compiled plan."""
    command = [python, "-m", "jaxspeed", "plan", f"configs/{case.config}.yaml"]
    command += ["--target", case.target, "--compile", "--json"]
    command += [word for change in case.sets for word in ("--set", change)]
    start, before = time.perf_counter(), os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, os.times()
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    cpu = after.children_user - before.children_user + after.children_system
    return wall, cpu - before.children_system, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--cuda", metavar="PYTHON")
    given = parser.parse_args()
    missed = []
    for name, case in CASES.items():
        on_gpus = case.target.startswith("h100")
        if given.only not in name or (on_gpus and not given.cuda):
            continue
        wall, cpu, plan = planned(case, given.cuda if on_gpus else sys.executable)
        argument, temp = (plan["compiled"][f"{kind}_bytes"] for kind in ("argument", "temp"))
        estimate = plan["memory"]["device"]
        print(
            f"{name:30} {case.target:10} argument {argument / 1e9:6.2f} GB, temp "
            f"{temp / 1e9:6.2f} GB; estimated {estimate / (argument + temp) - 1:+.0%}; "
            f"{wall:.0f} s, CPU {cpu:.0f} s",
            flush=True,
        )
        if case.peer:
            of_argument, of_temp = argument / case.peer[0], temp / case.peer[1]
            print(f"  of MaxText's: argument {of_argument:.2f}, temp {of_temp:.2f}")
            if of_argument > MOST_ARGUMENT or of_temp > MOST_TEMP:
                missed.append(name)
        if case.limited and wall > LIMIT:
            missed.append(f"{name} ({wall:.0f} s)")
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
