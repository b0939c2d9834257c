"""Multi-layer perceptron: the smallest model with stacked blocks, for tests and first steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from . import classification
from .classification import class_loss
from .layers import Linear, dropout, normal, scan_blocks, stacked


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults classify MNIST's digits."""

    input_size: int = 784
    hidden_size: int = 256
    num_hidden_layers: int = 2
    num_classes: int = 10  # or the number of real outputs
    dropout: float = 0.0
    unroll: int | bool = 1  # of the scan over layers


PRESETS: dict[str, Config] = {
    "tiny": Config(input_size=16, hidden_size=32, num_classes=4),
    "mnist": Config(),
}


class MLPBlock(nnx.Module):
    """x + relu(W x + b)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.linear = Linear({"embed": size}, {"mlp": size}, init=he(size), rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jax.nn.relu(self.linear(x)))


class MLP(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        embed = {"embed": c.hidden_size}
        self.input = Linear({"input": c.input_size}, embed, init=he(c.input_size), rngs=rngs)
        self.blocks = stacked(lambda rngs: MLPBlock(c, rngs=rngs), c.num_hidden_layers, rngs)
        self.head = Linear(
            embed, {"classes": c.num_classes}, init=normal(c.hidden_size**-0.5), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, ...] to [batch, classes]; dims after the batch are flattened."""
        x = x.reshape(x.shape[0], -1).astype(self.input.kernel.dtype)
        x = scan_blocks(self.blocks, jax.nn.relu(self.input(x)), unroll=self.config.unroll)
        return self.head(x)


def he(inputs: int) -> Initializer:
    """Normal with variance 2 / inputs (He et al., arXiv:1502.01852)."""
    return normal((2 / inputs) ** 0.5)


def build(config: Config, rngs: nnx.Rngs) -> MLP:
    return MLP(config, rngs=rngs)


def loss(model: MLP, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
    """(sum, weight) over the batch: cross-entropy for integer `y` [batch], else squared error.

    Labels of -100 do not count, and in evaluation there is an accuracy as well: see
    `jaxspeed.models.classification`. Real targets are [batch, classes]; their error is averaged
    over the outputs of a sample, and samples with a `mask` [batch] of 0 do not count.
    """
    out, y = model(batch["x"]), batch["y"]
    if jnp.issubdtype(y.dtype, jnp.integer):
        return class_loss(out, y, train)
    dtype = jnp.promote_types(out.dtype, jnp.float32)
    error = jnp.square(out.astype(dtype) - y.astype(dtype).reshape(out.shape))
    each = jnp.mean(error, axis=-1)
    if "mask" not in batch:
        return jnp.sum(each), jnp.asarray(len(y), dtype)
    counts = batch["mask"] != 0
    return jnp.sum(jnp.where(counts, each, 0)), jnp.sum(counts, dtype=dtype)


objective = classification.objective
