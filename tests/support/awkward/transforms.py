"""Models that use jax's and nnx's transformations themselves."""

from __future__ import annotations

import jax
from flax import nnx

from tests.support.awkward.base import DEPTH, Plain
from tests.support.awkward.state import DropoutBlock


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


class OwnCond(Plain):
    """Whether a block runs is decided by the data."""

    def through_blocks(self, x):
        for block in self.blocks:
            run, skip = (lambda module, x: module(x)), (lambda module, x: x)
            x = nnx.cond(x.sum() > -1e9, run, skip, block, x)
        return x
