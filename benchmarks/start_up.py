"""Seconds until the command line answers and until `jaxspeed.initialize` is imported.

Each in a process of its own, interleaved; medians, and the ratio to importing JAX, Flax and Optax.
"""

import statistics
import subprocess
import sys
import time

ROUNDS = 7
PLAIN = "import jax, flax, optax; from flax import nnx"
PYTHON = [sys.executable, "-c"]
JAXSPEED = [sys.executable, "-m", "jaxspeed"]
CASES = {
    "import jax, flax, optax": [*PYTHON, PLAIN],
    "the same, jaxspeed.initialize, .Config": [
        *PYTHON,
        f"{PLAIN}; import jaxspeed; jaxspeed.initialize, jaxspeed.Config",
    ],
    "the same, jaxspeed.Engine": [*PYTHON, f"{PLAIN}; import jaxspeed; jaxspeed.Engine"],
    "jaxspeed --help": [*JAXSPEED, "--help"],
    "jaxspeed nonsense": [*JAXSPEED, "nonsense"],
    "jaxspeed train, a bad config": [*JAXSPEED, "train", "configs/tiny.yaml", "--set", "bf17=1"],
    "jaxspeed config configs/tiny.yaml": [*JAXSPEED, "config", "configs/tiny.yaml"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    runs: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name, command in CASES.items():
            runs[name].append(seconds(command))
    plain = statistics.median(next(iter(runs.values())))
    for name, taken in runs.items():
        median = statistics.median(taken)
        spread = f"{min(taken):.2f} to {max(taken):.2f}"
        print(f"{name:<40} {median:5.2f} s ({spread}) {median / plain:5.2f}x")


if __name__ == "__main__":
    main()
