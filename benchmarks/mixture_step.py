"""Mixtures of experts on CPU against dense models, and expert 8 against data 8: layers and steps.

    python benchmarks/mixture_step.py [--pairs 20] [--only step] [--json]

Compiled forward and backward passes of a layer, in fp32:

- `mixture / dense`: a mixture of 8 experts, 2 of each token, against a SwiGLU layer with the same
  active FLOPs (twice an expert's width) on one device, with the router and without it.
- `expert 8 / data 8`: the same layer on eight simulated devices, experts sharded over `expert`,
  against samples sharded over `data` with all experts on each device. Tokens are balanced over
  experts: token i goes to the experts i and i + 1, modulo 8. Both programs end with gradients where
  ZeRO has them: reduced over the devices that compute them.

Optimizer steps of `configs/tiny_moe.yaml` by the engine, with the same two comparisons: against the
Llama with the same active FLOPs, and over `expert` against `data` with balanced tokens.

Each pair runs one program after the other, alternating which goes first. Reported is the median of
the ratios, with its quartiles.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxspeed
from jaxspeed import ops

EXPERTS, K, EMBED, MLP = 8, 2, 128, 256
BATCH, SEQ = 16, 128

TINY = Path(__file__).parents[1] / "configs" / "tiny_moe.yaml"
OF_MIXTURES = (
    "num_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "router_aux_loss_coef",
)

Run = Callable[[], Any]


def balanced(routing: ops.moe.Routing) -> ops.moe.Routing:
    """The same weights, of the experts i, i + 1, ... of token i."""
    batch, seq, k = routing.experts.shape
    tokens = jnp.arange(batch * seq).reshape(batch, seq, 1)
    chosen = (tokens + jnp.arange(k)) % routing.counts.shape[-1]
    return routing._replace(experts=chosen.astype(jnp.int32))


def mixture(params: Any, x: jax.Array, is_balanced: bool = False) -> jax.Array:
    router, gate, up, down = params
    routing = ops.moe.route(x, router, k=K, scores="softmax_of_top")
    if is_balanced:
        routing = balanced(routing)

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
        step = jax.jit(gradients(mixture, is_balanced=True), out_shardings=(None, (grads, samples)))
        compiled = step.lower(placed, x).compile()
    return lambda: compiled(placed, x)


@contextlib.contextmanager
def balanced_routers() -> Iterator[None]:
    real = ops.moe.route
    ops.moe.route = lambda *args, **options: balanced(real(*args, **options))
    try:
        yield
    finally:
        ops.moe.route = real


def step_of(count: int, mesh: dict[str, int], *, is_dense: bool = False) -> Run:
    """The engine's step of the tiny mixture, or of the dense model, on so many devices."""
    given = jaxspeed.Config.load(TINY).given
    sizes, seq = given["model"]["config"], given["data"]["seq_len"]
    if is_dense:
        sizes["intermediate_size"] *= sizes["num_experts_per_tok"]
        dense_sizes = {name: x for name, x in sizes.items() if name not in OF_MIXTURES}
        given["model"] = {"family": "llama", "config": dense_sizes}
    given |= {"mesh": mesh, "run": {"compilation_cache": False}, "scheduler": None}
    del given["data"]
    engine = jaxspeed.initialize(config=given, devices=jax.devices()[:count])
    drawn = np.random.default_rng(0).integers(0, 256, (given["train_batch_size"], seq + 1))
    batch = {"tokens": drawn.astype(np.int32)}
    placed = jax.device_put(batch, engine.program.batch_shardings(batch))
    jax.block_until_ready(engine.train_batch(placed))
    return lambda: engine.train_batch(placed)


def steps_over(axis: str) -> Run:
    with balanced_routers():
        return step_of(8, {axis: 8} if axis == "expert" else {})


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
    parser.add_argument("--only", default="", help="comparisons whose name has this word")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases: dict[str, Callable[[], tuple[Run, Run]]] = {
        "layer, mixture / dense": against_dense,
        "layer, expert 8 / data 8": lambda: (on_eight("expert"), on_eight("data")),
        "step, mixture / dense": lambda: (step_of(1, {}), step_of(1, {}, is_dense=True)),
        "step, expert 8 / data 8": lambda: (steps_over("expert"), steps_over("data")),
    }
    results = {}
    for name, pair in cases.items():
        if options.only not in name:
            continue
        found = ratios(*pair(), options.pairs)
        low, median, high = statistics.quantiles(found, n=4)
        results[name] = {"median": median, "quartiles": [low, high]}
    if options.json:
        print(json.dumps(results))
    else:
        for name, x in results.items():
            print(
                f"{name:26} {x['median']:.2f}  ({x['quartiles'][0]:.2f} to {x['quartiles'][1]:.2f})"
            )


if __name__ == "__main__":
    main()
