"""A network whose blocks are stacked, or in a list, and its training by plain JAX and Optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LAYERS, WIDTH, FEATURES = 6, 16, 8


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Stacked(nnx.Module):
    layers = LAYERS

    def __init__(self, rngs):
        self.input = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        @nnx.split_rngs(splits=self.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(rngs):
            return Block(rngs)

        self.blocks = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return block(x)

        return self.head(run(self.blocks, self.input(x)))[:, 0]


class Listed(Stacked):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(self.layers)])

    def __call__(self, x):
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """(sum, weight)."""
    error = jnp.square(model(batch["x"]) - batch["y"])
    return error.sum(), jnp.asarray(error.size, error.dtype)


def batches(steps: int = 10, samples: int = 16) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(samples, FEATURES)).astype(np.float32),
            "y": rng.normal(size=samples).astype(np.float32),
        }
        for _ in range(steps)
    ]


def forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """The network of a flat dict, the blocks stacked."""

    def linear(name: str, x: jax.Array, layer: Any = ...) -> jax.Array:
        return x @ params[f"{name}/kernel"][layer] + params[f"{name}/bias"][layer]

    x = linear("input", x)
    for i in range(len(params["blocks/up/bias"])):
        x = x + linear("blocks/down", jnp.tanh(linear("blocks/up", x, i)), i)
    return linear("head", x)[:, 0]


def plain(
    params: dict[str, Any],
    layers: list[int],
    others: tuple[str, ...],
    optimizer: optax.GradientTransformation,
    given: list[Any],
) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, parameters): only these layers of the blocks, and these modules, are in Optax."""
    rows = np.array(layers, int)
    params = {path: jnp.asarray(x) for path, x in params.items()}
    trained = {p: x[rows] for p, x in params.items() if p.startswith("blocks/")}
    trained |= {p: x for p, x in params.items() if p.split("/")[0] in others}

    def every(trained: Any) -> Any:
        stacks = {p: params[p].at[rows].set(x) for p, x in trained.items() if p.startswith("b")}
        return {**params, **trained, **stacks}

    @jax.jit
    @jax.value_and_grad
    def micro(trained: Any, batch: Any) -> jax.Array:
        return jnp.mean((forward(every(trained), batch["x"]) - batch["y"]) ** 2)

    state, losses = optimizer.init(trained), []
    for batch in given:
        value, grads = micro(trained, batch)
        losses.append(float(value))
        updates, state = optimizer.update(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
    return losses, {path: np.asarray(x) for path, x in every(trained).items()}


def stacked(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters by path, with those of a list of blocks stacked."""
    found = {p: np.asarray(x) for p, x in values.items() if not p.startswith("blocks/")}
    for path, x in values.items():
        _, *rest = path.split("/")
        if not path.startswith("blocks/"):
            continue
        if not rest[0].isdigit():
            found[path] = np.asarray(x)
        elif rest[0] == "0":
            name = "/".join(rest[1:])
            each = [values[f"blocks/{i}/{name}"] for i in range(LAYERS)]
            found[f"blocks/{name}"] = np.stack(each)
    return found
