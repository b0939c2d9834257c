"""Models whose blocks draw random numbers, keep statistics or change as they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from tests.support.awkward.base import WIDTH, Block, Plain


class NormBlock(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(super().__call__(x))


class BatchStatistics(Plain):
    """Blocks change their own statistics."""

    block = NormBlock


class DropoutBlock(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class Dropout(Plain):
    """Blocks draw random numbers and count them."""

    block = DropoutBlock


class NoisyBlock(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.rngs = rngs

    def __call__(self, x):
        return super().__call__(x) * (1 + 0.1 * jax.random.normal(self.rngs.params(), x.shape))


class SharedStreams(Plain):
    """All blocks hold one and the same Rngs, and the model draws from it before and after."""

    block = NoisyBlock

    def noise(self, x):
        return 0.1 * jax.random.normal(self.blocks[0].rngs.params(), x.shape)

    def __call__(self, x):
        x = super().__call__(x + self.noise(x))
        return x + self.noise(x)


class StreamsArgumentBlock(Block):
    def __call__(self, x, dropout, rngs):
        return dropout(super().__call__(x), rngs=rngs)


class StreamsAsArgument(Plain):
    """A module and an Rngs are handed to each block, which advances its counter."""

    block = StreamsArgumentBlock

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.dropout, self.rngs = nnx.Dropout(0.3), nnx.Rngs(dropout=5)

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x, self.dropout, rngs=self.rngs)
        return x


class SowingBlock(Block):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "seen", y)
        return y


class Sows(Plain):
    """Blocks leave their output behind in a variable that was not there before."""

    block = SowingBlock


class LazyBlock(Block):
    def __call__(self, x):
        if not hasattr(self, "cache"):
            self.cache = nnx.Cache(x.mean())
        return super().__call__(x) * (1 + self.cache[...])


class MakesAVariable(Plain):
    """Blocks make a variable when they are first called, and use it."""

    block = LazyBlock


class CountingBlock(Block):
    calls = 0

    def __call__(self, x):
        self.calls = self.calls + 1
        return super().__call__(x) * self.calls


class PythonCounter(Plain):
    """Blocks count their calls in a plain attribute, on which their result depends."""

    block = CountingBlock

    def __call__(self, x):
        x = self.head(self.through_blocks(self.through_blocks(x)))
        return x * sum(block.calls for block in self.blocks)


class RememberingBlock(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.last = nnx.data(jnp.zeros((1, WIDTH)))

    def __call__(self, x):
        self.last = super().__call__(x)
        return self.last


class RemembersItsOutput(Plain):
    """Blocks keep their output in an attribute, which the model reads afterwards."""

    block = RememberingBlock

    def __call__(self, x):
        y = super().__call__(x)
        return y + sum(block.last for block in self.blocks)
