"""Models that call, reach or share their blocks in their own way."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.support.awkward.base import DEPTH, WIDTH, Block, Plain
from tests.support.awkward.state import DropoutBlock, NormBlock


class ReadsABlocksWeight(Plain):
    """The model reaches into a block for its kernel: the leaf is used outside its unit as well."""

    def __call__(self, x):
        return super().__call__(x) + jnp.sum(self.blocks[0].up.kernel[...] ** 2)


class ChecksIsInstance(Plain):
    """A wrapper in a block's place would not be an instance of its class."""

    def through_blocks(self, x):
        for block in self.blocks:
            if not isinstance(block, Block):
                raise TypeError("not a Block")
            x = block(x)
        return x


class ChecksExactType(Plain):
    """Nor would a dynamic subclass be of exactly that class."""

    def through_blocks(self, x):
        for block in self.blocks:
            if type(block) is not Block:
                raise TypeError("not exactly a Block")
            x = block(x)
        return x


class KeywordBlock(Block):
    def __call__(self, x, scale, *, sign: int, mode: str = "plain", mask=None):
        y = x + sign * scale * self.down(jax.nn.gelu(self.up(x)))
        y = y if mask is None else y * mask
        return -y if mode == "negated" else y


class KeywordArguments(Plain):
    """Blocks take an array by position, and an int, a string and None by keyword."""

    block = KeywordBlock

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x, jnp.asarray(0.5, x.dtype), sign=2, mode="negated", mask=None)
        return x


class DictBlock(Block):
    def __call__(self, x):
        hidden = self.up(x)
        return {"x": x + self.down(jax.nn.gelu(hidden)), "aux": (hidden.mean(), None, "tag", 3)}


class ReturnsMoreThanArrays(Plain):
    """Blocks return a dict with a tuple with None, a string and a number in it."""

    block = DictBlock

    def through_blocks(self, x):
        extra = 0.0
        for block in self.blocks:
            out = block(x)
            mean, nothing, tag, number = out["aux"]
            if nothing is not None or tag != "tag" or type(number) is not int:
                raise TypeError("the block's results came back as something else")
            x, extra = out["x"], extra + mean * number
        return x + extra


class TiedWeights(Plain):
    """One Linear is in every block and outside of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        for block in self.blocks:
            block.down = self.blocks[0].down
        self.out = self.blocks[0].down

    def __call__(self, x):
        return super().__call__(x) + self.out(jnp.concatenate([x, x], -1))


class CalledTwice(Plain):
    """Every block runs twice, and its statistics move twice."""

    block = NormBlock

    def through_blocks(self, x):
        return super().through_blocks(super().through_blocks(x))


class DoublingBlock(Block):
    def __call__(self, x):
        return 2 * super().__call__(x)


class UnlikeBlocks(Plain):
    """No two blocks are of one class."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        kinds = (Block, NormBlock, DropoutBlock, DoublingBlock)
        self.blocks = nnx.List([kind(rngs) for kind in kinds])


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
        return x + nn.Dropout(0.3, deterministic=False)(y)


class LinenInside(Plain):
    """Blocks are Linen modules behind Flax's bridge."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        example = jnp.ones((4, WIDTH))
        bridged = [nnx.bridge.ToNNX(LinenBlock(), rngs=rngs) for _ in range(DEPTH)]
        self.blocks = nnx.List([block.lazy_init(example) for block in bridged])

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x, mutable=["batch_stats"])
        return x


class ClosureBlock(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.after: Any = None

    def __call__(self, x):
        return self.after(super().__call__(x))


class Closure(Plain):
    """Blocks call a function that closes over another module, whose statistics change."""

    block = ClosureBlock

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def through_blocks(self, x):
        norm = self.norm
        for block in self.blocks:
            block.after = lambda y: norm(y)
        x = super().through_blocks(x)
        for block in self.blocks:
            block.after = None
        return x


class EncodingBlock(Block):
    def encode(self, x):
        return self(x) + self.down(self.up(x))


class OtherMethod(Plain):
    """The model calls a method of the block that is not __call__, which reads weights itself."""

    block = EncodingBlock

    def through_blocks(self, x):
        for block in self.blocks:
            x = block.encode(x)
        return x


class ModuleArgumentBlock(Block):
    def __call__(self, x, norm):
        return norm(super().__call__(x))


class ModuleAsArgument(Plain):
    """One norm is handed to every block, which changes it."""

    block = ModuleArgumentBlock

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x, self.norm)
        return x


class InSequential(Plain):
    """The list is an nnx.Sequential, with a plain function and a Linear among its members."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(Block(rngs), jax.nn.relu, Block(rngs), last)

    def through_blocks(self, x):
        return self.blocks(x)
