"""Small nnx models, each awkward in its own way for whoever cuts a model into units.

All map [samples, WIDTH] to [samples, WIDTH]. None of them knows that units exist.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
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


class OwnRemat(Plain):
    """Blocks run under the user's own nnx.remat."""

    block = DropoutBlock

    def through_blocks(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda module, x: module(x))(block, x)
        return x


class OwnJit(Plain):
    """Blocks run under the user's own nnx.jit."""

    block = DropoutBlock

    def through_blocks(self, x):
        for block in self.blocks:
            x = nnx.jit(lambda module, x: module(x))(block, x)
        return x


class OwnScan(Plain):
    """Blocks are stacked, and run under the user's own nnx.scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        make = nnx.vmap(lambda rngs: DropoutBlock(rngs), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(DEPTH))

    def through_blocks(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


class OwnVmap(Plain):
    """Blocks are called for one sample at a time, under jax.vmap."""

    def through_blocks(self, x):
        for block in self.blocks:
            x = jax.vmap(block)(x)
        return x


class OwnGrad(Plain):
    """The output holds the model's own gradient: a gradient penalty, second derivatives."""

    def __call__(self, x):
        own = super().__call__
        return own(x) + jax.grad(lambda x: own(x).sum())(x)


class InSequential(Plain):
    """The list is an nnx.Sequential, with a plain function and a Linear among its members."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(Block(rngs), jax.nn.relu, Block(rngs), last)

    def through_blocks(self, x):
        return self.blocks(x)


class OwnCond(Plain):
    """Whether a block runs is decided by the data."""

    def through_blocks(self, x):
        for block in self.blocks:
            run, skip = (lambda module, x: module(x)), (lambda module, x: x)
            x = nnx.cond(x.sum() > -1e9, run, skip, block, x)
        return x


# Each model with the units that are to be found in it: (class, how many calls).
AWKWARD: dict[type[nnx.Module], tuple[tuple[str, int], ...]] = {
    Plain: (("Block", 3),),
    ReadsABlocksWeight: (("Block", 3),),
    ChecksIsInstance: (("Block", 3),),
    ChecksExactType: (("Block", 3),),
    KeywordArguments: (("KeywordBlock", 3),),
    ReturnsMoreThanArrays: (("DictBlock", 3),),
    BatchStatistics: (("NormBlock", 3),),
    Dropout: (("DropoutBlock", 3),),
    SharedStreams: (("NoisyBlock", 3),),
    StreamsAsArgument: (("StreamsArgumentBlock", 3),),
    TiedWeights: (("Block", 3),),
    CalledTwice: (("NormBlock", 6),),
    UnlikeBlocks: (("Block", 1), ("NormBlock", 1), ("DropoutBlock", 1), ("DoublingBlock", 1)),
    LinenInside: (("ToNNX", 3),),
    Sows: (("SowingBlock", 3),),
    MakesAVariable: (("LazyBlock", 3),),
    PythonCounter: (("CountingBlock", 6),),
    RemembersItsOutput: (("RememberingBlock", 3),),
    Closure: (("ClosureBlock", 3),),
    OtherMethod: (("EncodingBlock", 3),),
    ModuleAsArgument: (("ModuleArgumentBlock", 3),),
    OwnRemat: (("DropoutBlock", 3),),
    OwnJit: (("DropoutBlock", 3),),
    OwnScan: (("DropoutBlock", 3),),
    OwnVmap: (("Block", 3),),
    OwnGrad: (("Block", 6),),
    InSequential: (("Block", 2), ("Linear", 2)),
    OwnCond: (("Block", 3),),
}
