"""A model of the tests' own: its blocks are a list, it has no attention and no vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """Mixes along tokens, then along features."""

    def __init__(self, width, tokens, *, rngs):
        self.along_tokens = nnx.Linear(tokens, tokens, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):  # [batch, tokens, width]
        x = x + self.along_tokens(x.swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Mixer(nnx.Module):
    def __init__(self, width, tokens, depth, *, rngs):
        self.blocks = nnx.List([Block(width, tokens, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def loss(model, batch):
    errors = jnp.square(model(batch["x"]).astype(jnp.float32) - batch["y"]).mean(-1)
    return errors.sum(), errors.size
