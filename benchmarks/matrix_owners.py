"""Muon's update of 24 matrices of 512 x 2,048: on one CPU device, and owned by 8 simulated ones.

The devices share the machine's cores: work that all repeat would take eight times as long.

    python benchmarks/matrix_owners.py
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.optim import build_optimizer
from jaxspeed.placement import Leaf
from jaxspeed.placement.linear_layers import matrices_of
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.owned import Matrices
from jaxspeed.placement.table import build_table

COUNT, SHAPE, RUNS = 24, (512, 2048), 7


def update_on(devices: list[jax.Device]):
    """(the compiled update, its arguments) of listed layers at stage 3."""
    leaves = [Leaf(f"layers/{i}/kernel", SHAPE, jnp.float32) for i in range(COUNT)]
    table = build_table(leaves, build_mesh({"data": len(devices)}, devices), stage=3)
    asked = {
        leaf.path: Matrices(matrices_of(leaf), frozenset(), jnp.dtype(jnp.float32))
        for leaf in leaves
    }
    table = table.with_owners([asked])
    at = {leaf.path: table.sharding(table[leaf.path].opt) for leaf in leaves}
    rng = np.random.default_rng(0)
    grads = {
        path: jax.device_put(rng.normal(size=SHAPE).astype(np.float32), sharding)
        for path, sharding in at.items()
    }
    optimizer = build_optimizer("Muon", {"lr": 0.02})
    state = jax.jit(optimizer.init)(grads)

    def update(grads, state):
        return optimizer.update(grads, state, grads, placements=table)[0]

    return jax.jit(update).lower(grads, state).compile(), (grads, state)


def main() -> None:
    programs = {n: update_on(jax.devices()[:n]) for n in (1, 8)}
    seconds: dict[int, list[float]] = {n: [] for n in programs}
    for _ in range(RUNS + 1):
        for n, (update, args) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(update(*args))
            seconds[n].append(time.perf_counter() - start)
    medians = {n: statistics.median(s[1:]) for n, s in seconds.items()}
    for n, s in seconds.items():
        print(f"{n} devices: {medians[n]:.2f} s ({min(s[1:]):.2f} to {max(s[1:]):.2f})")
    print(f"ratio: {medians[8] / medians[1]:.2f}")


if __name__ == "__main__":
    main()
