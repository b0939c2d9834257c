"""Cost of a parameter server compared with data parallelism, and its pace by staleness.

    python benchmarks/parameter_server.py [--million 8] [--steps 30] [--json]

On eight simulated devices, or on whatever devices there are. First the wall time of a step: four
devices that compute, once by XLA's collectives and once with two servers, alternating, with the
same state and batch; and the bytes that a worker and a server hold and move. Then, in the virtual
time of the seeded clock and with one worker of four five times as slow, the accepted pushes a
second in step, with `wait` and with `drop`.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import jaxspeed
from jaxspeed.parameter_server import Rule, VirtualClock, WorkerSchedule
from jaxspeed.parameter_server.virtual_clock import synchronous_step_seconds

WIDTH, ROWS, RANKS, SERVERS = 1024, 256, 4, 2
SLOWED = (1.0, 1.0, 1.0, 5.0)


def engine_of(million: int, count: int, parallel: dict[str, Any]) -> Any:
    """Layers of one million fp32 parameters each, with Adam's moments."""

    def init(key: jax.Array) -> Any:
        return [jax.random.normal(key, (WIDTH, WIDTH)) / 32 for _ in range(million)]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return x

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["x"]) - batch["x"]).mean()

    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "parallel": parallel,
    }
    return jaxspeed.initialize((init, apply), loss, config, devices=jax.devices()[:count])


def step_seconds(million: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step, the engines alternating."""
    server = {"data_reduction": "parameter_server", "servers": SERVERS}
    engines = {
        "xla": engine_of(million, RANKS, {}),
        "parameter_server": engine_of(million, RANKS + SERVERS, server),
    }
    batch = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(steps + 2):
        for name, engine in engines.items():
            start = time.perf_counter()
            jax.block_until_ready((engine.train_batch(batch), engine.state))
            if turn >= 2:  # the first ones compile
                taken[name].append(time.perf_counter() - start)
    program = engines["parameter_server"].program
    return {
        "parameter_bytes": 4 * million * WIDTH * WIDTH,
        "step_seconds": {name: statistics.median(each) for name, each in taken.items()},
        "worker_sends": program.serving.push.bytes,
        "worker_gets": program.serving.pull.bytes,
        "server_gets": RANKS * program.serving.push.bytes // SERVERS,
    }


def pushes_a_second(pushes: int = 1000) -> dict[str, float]:
    """Accepted pushes per virtual second, with one slow worker."""
    clock = VirtualClock(SLOWED)
    rounds = pushes // RANKS
    found = {"in step": pushes / sum(synchronous_step_seconds(clock) for _ in range(rounds))}
    for on_stale in ("wait", "drop"):
        for s in (2, 4, 8, 16):
            clock = VirtualClock(SLOWED)
            schedule = WorkerSchedule(Rule(s, on_stale), clock)  # type: ignore[arg-type]
            while schedule.ledger.accepted < pushes:
                if schedule.begin() is None:
                    schedule.arrive()
            found[f"{on_stale}, max_staleness {s}"] = pushes / clock.now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--million", type=int, default=8, help="parameters")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {**step_seconds(given.million, given.steps), "pushes_a_second": pushes_a_second()}
    if given.json:
        print(json.dumps(found))
        return
    for name, seconds in found["step_seconds"].items():
        print(f"{name:<18}{1e3 * seconds:8.1f} ms a step, {RANKS} devices that compute")
    for name in ("parameter_bytes", "worker_sends", "worker_gets", "server_gets"):
        print(f"{name:<18}{found[name] / 1e6:8.1f} MB")
    print("one worker of four takes five times as long; accepted pushes a virtual second:")
    for name, rate in found["pushes_a_second"].items():
        print(f"  {name:<24}{rate:6.2f}")


if __name__ == "__main__":
    main()
