"""Models whose numbers are clean: a few large square matrices, tanh(x @ w) each.

What the derivative of such a layer needs is its input, its output (the next one's input) and its
weight, nothing else. A `shift` is added to the input, so that the first layer's input has a
gradient as all others do, and so each layer's weight is needed in both passes. The loss is a
(sum, weight), so that stages 0 and 1 may reduce once a step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import jaxspeed


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / jnp.sqrt(shape[-1])


class Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.w = nnx.Param(_normal(rngs.params(), width, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.w[...])


class Listed(nnx.Module):
    """Layers in a list, called one after the other."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs):
        self.shift = nnx.Param(jnp.zeros(width))
        self.layers = nnx.List([Layer(width, rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.shift[...]
        for layer in self.layers:
            x = layer(x)
        return x


class Scanned(nnx.Module):
    """The same layers stacked, and scanned."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs):
        self.shift = nnx.Param(jnp.zeros(width))
        self.layers = nnx.vmap(
            lambda rngs: Layer(width, rngs),
            in_axes=0,
            out_axes=0,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )(rngs.fork(split=layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.layers)

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, layer)(x), None

        return jax.lax.scan(body, x + self.shift[...], state)[0]


class LookedUp(nnx.Module):
    """Rows of a table, through one layer."""

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs):
        names = {"out_sharding": ("vocab", "embed"), "eager_sharding": False}
        self.table = nnx.Param(_normal(rngs.params(), rows, width), **names)
        self.layer = Layer(width, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.layer(self.table[...][ids])


class LinenLayer(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.param("w", lambda key: _normal(key, self.width, self.width))
        return jnp.tanh(x @ w)


class LinenStack(linen.Module):
    layers: int
    width: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.param("shift", lambda key: jnp.zeros(self.width))
        for _ in range(self.layers):
            x = LinenLayer(self.width)(x)
        return x


@jaxspeed.unit
def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def pure_functions(layers: int, width: int) -> Any:
    """(init, apply) with the layers' matrices in a list."""

    def init(key: jax.Array) -> Any:
        matrices = [_normal(k, width, width) for k in jax.random.split(key, layers)]
        return {"layers": matrices, "shift": jnp.zeros(width)}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        x = x + params["shift"]
        for w in params["layers"]:
            x = layer(w, x)
        return x

    return init, apply


FORMS: dict[str, Any] = {
    "listed": lambda layers, width: lambda rngs: Listed(layers, width, rngs),
    "scanned": lambda layers, width: lambda rngs: Scanned(layers, width, rngs),
    "linen": lambda layers, width: LinenStack(layers, width),
    "functions": pure_functions,
}


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of the squared error."""
    error = (model(batch["x"]) - batch["y"]).astype(jnp.float32)
    return jnp.sum(error**2), jnp.asarray(error.size, jnp.float32)


def mean_square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["ids"]).astype(jnp.float32) ** 2)


def batch_of(samples: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct((samples, width), jnp.float32)
    return {"x": shape, "y": shape}


def config_of(
    stage: int,
    *,
    mixed: bool = True,
    accumulation: int = 1,
    micro: int = 1,
    mesh: dict[str, int] | None = None,
    **more: Any,
) -> jaxspeed.Config:
    """Adam under a ZeRO stage, every leaf cut; bf16 with fp32 masters, or all fp32."""
    return jaxspeed.Config.model_validate(
        {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "bf16": {"enabled": mixed},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "mesh": mesh or {"data": -1},
            **more,
        }
    )
