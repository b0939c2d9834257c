"""The plain model that the awkward ones are variants of."""

from __future__ import annotations

import jax
from flax import nnx

WIDTH = 12  # on 8 devices one dim is padded and the other, twice as wide, is not
DEPTH = 3


class Block(nnx.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Plain(nnx.Module):
    """Nothing awkward: a list of blocks and a head."""

    block: type[nnx.Module] = Block

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([self.block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, x):
        return self.head(self.through_blocks(x))
