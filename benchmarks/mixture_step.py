"""Layers of experts on CPU: a mixture against a dense layer, and expert 8 against data 8.

    python benchmarks/mixture_step.py [--pairs 20] [--json]

Two comparisons of compiled forward and backward passes, in fp32:

- `dense`: a mixture of 8 experts, 2 of each token, against a SwiGLU layer with the same active
  FLOPs (twice an expert's width) on one device, with the router and without it.
- `expert 8`: the same layer on eight simulated devices, experts sharded over `expert`, against
  samples sharded over `data` with all experts on each device. Tokens are balanced over experts:
  token i goes to the experts i and i + 1, modulo 8. Both programs end with gradients where ZeRO has
  them: reduced over the devices that compute them.

Each pair runs one program after the other, alternating which goes first. Reported is the median of
the ratios, with its quartiles.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed import ops

EXPERTS, K, EMBED, MLP = 8, 2, 128, 256
BATCH, SEQ = 16, 128

Run = Callable[[], Any]


def mixture(params: Any, x: jax.Array, balanced: bool = False) -> jax.Array:
    router, gate, up, down = params
    routing = ops.moe.route(x, router, k=K, scores="softmax_of_top")
    if balanced:
        tokens = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
        chosen = (tokens[..., None] + jnp.arange(K)) % EXPERTS
        routing = routing._replace(experts=chosen.astype(jnp.int32))

    def feed_forward(rows: Any) -> jax.Array:
        hidden = jax.nn.silu(rows.product(gate)) * rows.product(up)
        return rows.product(down, hidden * rows.weights)

    return ops.moe.mixture(x, routing, feed_forward)


def dense(params: Any, x: jax.Array) -> jax.Array:
    _, gate, up, down = params
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def weights(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=s) / np.sqrt(s[-2])).astype(np.float32) for s in shapes]


def gradients(layer: Callable[..., jax.Array], **options: Any) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x + layer(params, x, **options)))

    return jax.value_and_grad(loss, argnums=(0, 1))


def experts() -> list[np.ndarray]:
    stack = (EXPERTS, EMBED, MLP)
    return weights((EMBED, EXPERTS), stack, stack, (EXPERTS, MLP, EMBED))


def against_dense() -> tuple[Run, Run]:
    (x,) = weights((BATCH, SEQ, EMBED))
    wide = (EMBED, K * MLP)
    of_dense = weights((EMBED, EXPERTS), wide, wide, (K * MLP, EMBED))
    mine, theirs = jax.jit(gradients(mixture)), jax.jit(gradients(dense))
    mine_args, their_args = jax.device_put((experts(), x)), jax.device_put((of_dense, x))
    return lambda: mine(*mine_args), lambda: theirs(*their_args)


def on_eight(axis: str) -> Run:
    devices = np.array(jax.devices()[:8])
    sizes = [8 if name == axis else 1 for name in ("data", "expert")]
    mesh = Mesh(devices.reshape(sizes), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    samples = NamedSharding(mesh, P(("data", "expert")))
    stacked = NamedSharding(mesh, P("expert"))
    placed = [
        jax.device_put(w, stacked if w.ndim == 3 else NamedSharding(mesh, P())) for w in experts()
    ]
    x = jax.device_put(weights((BATCH, SEQ, EMBED))[0], samples)
    # The gradients of experts that all devices have are left sharded, as under ZeRO 2.
    grads = [
        NamedSharding(mesh, P("expert" if axis == "expert" else "data")) if w.ndim == 3 else None
        for w in placed
    ]
    with jax.set_mesh(mesh):
        step = jax.jit(gradients(mixture, balanced=True), out_shardings=(None, (grads, samples)))
        compiled = step.lower(placed, x).compile()
    return lambda: compiled(placed, x)


def ratios(first: Run, second: Run, pairs: int) -> list[float]:
    def seconds(run: Run) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    for _ in range(3):
        seconds(first), seconds(second)
    found = []
    for i in range(pairs):
        if i % 2:
            a, b = seconds(first), seconds(second)
        else:
            b, a = seconds(second), seconds(first)
        found.append(a / b)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = {
        "mixture / dense": against_dense(),
        "expert 8 / data 8": (on_eight("expert"), on_eight("data")),
    }
    results = {}
    for name, pair in cases.items():
        found = ratios(*pair, options.pairs)
        low, median, high = statistics.quantiles(found, n=4)
        results[name] = {"median": median, "quartiles": [low, high]}
    if options.json:
        print(json.dumps(results))
    else:
        for name, x in results.items():
            print(
                f"{name:20} {x['median']:.2f}  ({x['quartiles'][0]:.2f} to {x['quartiles'][1]:.2f})"
            )


if __name__ == "__main__":
    main()
