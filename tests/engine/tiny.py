"""Models small enough to compile in a second, and what trains them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxspeed

FEATURES, HIDDEN = 8, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Listed(nnx.Module):
    """Layers in a list, as people write them."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 3):
        self.input = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.head = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = jnp.tanh(nn.Dense(HIDDEN)(x))
        return nn.Dense(1)(x)


def init_pair(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    layers = [{"w": jax.random.normal(k, (FEATURES, FEATURES)) / 3} for k in keys]
    return {"layers": layers, "out": jnp.ones((FEATURES, 1))}


@jaxspeed.unit
def pair_layer(p, x):
    return x + jnp.tanh(x @ p["w"])


def apply_pair(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = pair_layer(layer, x)
    return x @ params["out"]


PAIR = (init_pair, apply_pair)


def squared_error(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """(sum, weight)."""
    error = jnp.square(model(batch["x"])[:, 0] - batch["y"])
    return error.sum(), jnp.asarray(error.size, error.dtype)


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        **more,
    }


def batch(samples: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}


def engine(model: Any = Listed, loss_fn: Any = squared_error, stage: int = 0, **more: Any) -> Any:
    """An engine for one of these models; `more` are sections of the config, or what initialize
    takes beside it."""
    names = ("optimizer_", "devices", "example_batch", "trainable", "init_with")
    taken = {k: more.pop(k) for k in names if k in more}
    if "optimizer_" in taken:
        taken["optimizer"] = taken.pop("optimizer_")
    if isinstance(model, nn.Module):
        taken.setdefault("example_batch", batch())
    return jaxspeed.initialize(model, loss_fn, config(stage, **more), **taken)
