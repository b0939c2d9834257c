"""Seconds until the command line answers, `initialize` is imported, and a run has its first step.

Each in a process of its own, in a new order every round; medians of wall and CPU time, and the
ratio of CPU time to importing JAX, Flax and Optax. Where the machine's load changes, processes
differ by more than that ratio: `import_ratio` has it within one process, from its start to the end
of both imports. The config of `make train` runs one step, with an empty cache of compiled programs
and with a full one: until its first step is shown, and from there to the end.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS, RUNS = 15, 3
PLAIN = "import jax, flax, optax; from flax import nnx"
PYTHON = [sys.executable, "-c"]
JAXSPEED = [sys.executable, "-m", "jaxspeed"]
TINY = "configs/tiny.yaml"
CASES = {
    "import jax, flax, optax": [*PYTHON, PLAIN],
    "the same, jaxspeed.initialize, .Config": [
        *PYTHON,
        f"{PLAIN}; import jaxspeed; jaxspeed.initialize, jaxspeed.Config",
    ],
    "the same, jaxspeed.Engine": [*PYTHON, f"{PLAIN}; import jaxspeed; jaxspeed.Engine"],
    "jaxspeed --help": [*JAXSPEED, "--help"],
    "jaxspeed nonsense": [*JAXSPEED, "nonsense"],
    "jaxspeed train, a bad config": [*JAXSPEED, "train", TINY, "--set", "bf16.enabld=1"],
    "jaxspeed plan, a bad target": [*JAXSPEED, "plan", TINY, "--target", "h101:8"],
    f"jaxspeed config {TINY}": [*JAXSPEED, "config", TINY],
}
Seconds = tuple[float, float]  # wall, CPU


def cpu_of(process: int) -> float:
    """CPU seconds that a running process has used."""
    with open(f"/proc/{process}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def seconds(command: list[str]) -> Seconds:
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, child.returncode, used = os.wait4(child.pid, 0)
    return time.perf_counter() - start, used.ru_utime + used.ru_stime


def import_ratio() -> float:
    """CPU time of a process with `jaxspeed.Config` imported, relative to JAX, Flax and Optax."""
    code = (
        f"import time; {PLAIN}; plain = time.process_time()\n"
        "import jaxspeed; jaxspeed.initialize, jaxspeed.Config\n"
        "print(time.process_time() / plain)"
    )
    return float(subprocess.check_output([*PYTHON, code]))


def one_step(cache: str) -> tuple[Seconds, Seconds]:
    """Until a run's first step, and from there to the end."""
    with tempfile.TemporaryDirectory() as folder:
        keys = ("run.steps=1", f"run.output={folder}/run", f"run.compilation_cache={cache}")
        overrides = [word for key in keys for word in ("--set", key)]
        start, step = time.perf_counter(), (0.0, 0.0)
        child = subprocess.Popen(
            [*JAXSPEED, "train", TINY, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("step 1/1") and not step[0]:
                step = time.perf_counter() - start, cpu_of(child.pid)
        _, child.returncode, used = os.wait4(child.pid, 0)
        wall, cpu = time.perf_counter() - start, used.ru_utime + used.ru_stime
        return step, (wall - step[0], cpu - step[1])


def main() -> None:
    runs: dict[str, list[Seconds]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name in random.sample(list(CASES), len(CASES)):
            runs[name].append(seconds(CASES[name]))
    ratios = sorted(import_ratio() for _ in range(ROUNDS))
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                step, rest = one_step(cache)
                runs.setdefault(f"jaxspeed train, {state}: first step", []).append(step)
                runs.setdefault(f"jaxspeed train, {state}: from there to the end", []).append(rest)
    plain = statistics.median(cpu for _, cpu in next(iter(runs.values())))
    for name, taken in runs.items():
        wall, cpu = (statistics.median(each) for each in zip(*taken))
        print(f"{name:<48} {wall:6.2f} s   CPU {cpu:6.2f} s {cpu / plain:6.2f}x")
    middle = statistics.median(ratios)
    print(f"the import, in one process: {middle:.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
