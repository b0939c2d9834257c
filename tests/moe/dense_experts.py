"""A mixture without dispatch: every expert computes every token, in einsums over stacked experts.

With what trains it in plain Flax and Optax, from the same batches in the same micro-batches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxspeed

FEATURES, EMBED, INNER, EXPERTS, LAYERS = 6, 8, 16, 4, 2
SAMPLES, STEPS, SEED, RATE = 16, 2, 3, 0.02

Arrays = dict[str, np.ndarray]


def stacked(rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str, ...]) -> nnx.Param:
    value = nnx.initializers.lecun_normal(batch_axis=0)(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, logical_axes=names)


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, experts: int = EXPERTS):
        self.router = nnx.Linear(EMBED, experts, use_bias=False, rngs=rngs)
        self.up = stacked(rngs, (experts, EMBED, INNER), ("experts", "embed", "mlp"))
        self.down = stacked(rngs, (experts, INNER, EMBED), ("experts", "mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        share = jax.nn.softmax(self.router(x))  # [batch, experts]
        hidden = jnp.tanh(jnp.einsum("bd,edf->ebf", x, self.up[...]))
        return x + jnp.einsum("ebf,efd,be->bd", hidden, self.down[...], share)


class DenseMixture(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, experts: int = EXPERTS):
        self.input = nnx.Linear(FEATURES, EMBED, rngs=rngs)
        self.blocks = nnx.List([Experts(rngs, experts) for _ in range(LAYERS)])
        self.head = nnx.Linear(EMBED, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


def loss_fn(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    error = jnp.square(model(batch["x"]) - batch["y"]) * batch["weight"]
    return error.sum(), batch["weight"].sum()


def batches() -> list[Arrays]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": (x := rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)),
            "y": np.sin(x.sum(1)),
            "weight": rng.integers(1, 4, SAMPLES).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "run": {"seed": SEED, "compilation_cache": False},
        **more,
    }


def plain() -> tuple[list[float], Arrays]:
    """Losses and final parameters on one device, of each batch as one."""
    graph, params = nnx.split(DenseMixture(nnx.Rngs(SEED)), nnx.Param)
    optimizer = optax.adam(RATE)
    state, losses = optimizer.init(params), []

    def mean(params: Any, batch: Any) -> jax.Array:
        total, weight = loss_fn(nnx.merge(graph, params), batch)
        return total / weight

    for batch in batches():
        loss, grads = jax.jit(jax.value_and_grad(mean))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, flat(params)


def flat(state: Any) -> Arrays:
    return {
        "/".join(map(str, keys)): np.asarray(v.get_value()) for keys, v in nnx.to_flat_state(state)
    }


def trained(given: Any, **more: Any) -> tuple[Any, list[float], Arrays]:
    """The engine, its losses and its final parameters."""
    engine = jaxspeed.initialize(DenseMixture, loss_fn, given, **more)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
    return engine, losses, flat(nnx.state(engine.module, nnx.Param))
