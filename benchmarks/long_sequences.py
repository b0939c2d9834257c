"""Long sequences compiled for absent devices: bytes per device, beside the peers' figures.

Llama-3.1-8B with 512,000 tokens on one H100 and 3.7 million on 8, where ALST trains 500K and 3.7M;
with 131,072 tokens a sequence on TPUs, and the 70B, where MaxText was compiled with the same mesh
(fp32 master and Adam, full remat; its keys gathered with balanced load). "Fits" is by the memory of
a device, and for GPUs by 250 GB of host memory each. Each is a `jaxspeed plan` in a process of its
own; GPUs need `--cuda PYTHON`, the interpreter of an environment with jaxspeed[cuda].

    python benchmarks/long_sequences.py [--only 8b] [--cuda PYTHON]
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass

from jaxspeed.hardware.known_chips import chips_of
from jaxspeed.hardware.targets import target_of

HOST = 250e9  # bytes of host memory for a GPU


@dataclass(frozen=True)
class Case:
    """A plan; `peer` are MaxText's bytes of arguments and temporaries, `most` a share of these."""

    config: str
    target: str
    sets: tuple[str, ...] = ()
    peer: tuple[float, float] | None = None
    most: float | None = None


def tokens(count: int) -> tuple[str, ...]:
    return f"data.seq_len={count}", f"model.config.max_position_embeddings={count}"


CASES = {
    "8b, 512,000 tokens": Case("long_8b_500k", "h100:1"),
    "8b, 3,702,784 tokens, seq 8": Case(
        "long_8b_500k", "h100:8", ("mesh.seq=8", *tokens(3_702_784))
    ),
    "8b, 131,072 tokens, seq 8, data 8": Case(
        "long_8b_128k", "v5p:4x4x4", peer=(1.51e9, 15.19e9), most=0.6
    ),
    "8b, 131,072 tokens, seq 8": Case(
        "long_8b_128k", "v5p:2x2x2", peer=(12.05e9, 15.97e9), most=0.8
    ),
    "70b, 131,072 tokens, seq 16, data 16": Case(
        "long_8b_128k",
        "v6e:16x16",
        ("mesh.seq=16", "model.preset=llama3.1-70b"),
        peer=(3.33e9, 19.91e9),
    ),
}


def planned(case: Case, python: str) -> tuple[float, dict]:
    """(seconds, the plan) of a compiled plan."""
    command = [python, "-m", "jaxspeed", "plan", f"configs/{case.config}.yaml"]
    command += ["--target", case.target, "--compile", "--json"]
    command += [word for change in case.sets for word in ("--set", change)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return seconds, json.loads(done.stdout)


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
        seconds, plan = planned(case, given.cuda if on_gpus else sys.executable)
        compiled, chip = plan["compiled"], target_of(case.target, chips_of()).chip
        if compiled is None:
            print(f"{name:38} {case.target:10} does not compile", flush=True)
            missed.append(name)
            continue
        argument, temp = (compiled[f"{kind}_bytes"] for kind in ("argument", "temp"))
        host = compiled["host_argument_bytes"] + compiled["host_temp_bytes"]
        fits = argument + temp <= chip.memory and (not on_gpus or host <= HOST)
        print(
            f"{name:38} {case.target:10} argument {argument / 1e9:6.2f} GB, temp "
            f"{temp / 1e9:6.2f} GB, host {host / 1e9:6.2f} GB: "
            f"{'fits' if fits else 'does not fit'}; {seconds:.0f} s",
            flush=True,
        )
        share = temp / case.peer[1] if case.peer else 0.0
        if case.peer:
            print(f"  of MaxText's: argument {argument / case.peer[0]:.2f}, temp {share:.2f}")
        if not fits or (case.most is not None and share > case.most):
            missed.append(name)
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
