"""Encoders of images of a fixed size: CLIP's (arXiv:2103.00020) and SigLIP's (arXiv:2303.15343).

A batch has the images of a sample as `patches` [batch, rows, patch]: those of one image after
another, row by row, each flattened as (row, column, channel). Dims of the parameters have names
that no mesh axis shards (`image_heads`, ...): instead, images are spread over the devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspeed import ops

from .blocks import ACTIVATIONS, Attention, FeedForward, NormBefore, Projections
from .layers import (
    LayerNorm,
    Linear,
    check_heads,
    normal,
    param,
    scan_blocks,
    stacked,
)

OF_IMAGES = "image_"  # of names of dims


@dataclass(frozen=True)
class Config:
    """Sizes of a tower; the defaults are those of CLIP ViT-L/14 at 336 pixels."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    image_size: int = 336
    patch_size: int = 14
    num_channels: int = 3
    activation: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    is_clip: bool = True  # a class token and a norm before the blocks; no bias of patches
    is_bucketed: bool = False  # positions are chosen by their share of a side, as in Idefics
    unroll: int | bool = 1  # of the scan over layers

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_attention_heads)
        if not 1 <= self.patch_size <= self.image_size:
            raise ValueError(f"patch_size {self.patch_size} is not in 1 to {self.image_size}")

    @property
    def side(self) -> int:
        """Patches of a row, and of a column."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Of an image."""
        return self.side**2

    @property
    def positions(self) -> np.ndarray:
        """The position of each patch: with rounding errors that trained models have seen."""
        numbers = np.arange(self.side)
        if self.is_bucketed:
            step = 1 / self.side
            ends = (step + step * np.arange(math.ceil((1 - step) / step))).astype(np.float32)
            shares = numbers.astype(np.float32) * np.float32(step)
            numbers = np.searchsorted(ends, np.minimum(shares, np.float32(1 - 1e-6)), "right")
        return (numbers[:, None] * self.side + numbers).reshape(-1)

    @property
    def patch(self) -> int:
        """Numbers of a patch."""
        return self.patch_size**2 * self.num_channels


class Unread(nnx.Variable[jax.Array]):
    """A weight of the files that nothing reads: it is exported as it was."""


class Tower(nnx.Module):
    """Embeddings of patches and positions, stacked blocks, and norms.

    Args:
      layers: the number of blocks that are run, if not all; the others are unread weights.
      last_norm: whether the norm after the blocks is applied, or unread too.
    """

    def __init__(
        self,
        config: Config,
        *,
        layers: int | None = None,
        last_norm: bool = True,
        rngs: nnx.Rngs,
    ):
        c = config
        self.config = c
        layers = c.num_hidden_layers if layers is None else layers
        init, embed = normal(c.initializer_range), {"embed": c.hidden_size}
        self.patches = Linear({"patch": c.patch}, embed, init=init, bias=not c.is_clip, rngs=rngs)
        self.class_token = param(rngs, init, embed) if c.is_clip else None
        self.positions = param(rngs, init, {"pos": c.num_patches + c.is_clip} | embed)
        self.first_norm = norm(c, rngs) if c.is_clip else None
        self.blocks = stacked(lambda rngs: block(c, rngs), layers, rngs)
        rest = c.num_hidden_layers - layers
        self.further = unread(stacked(lambda rngs: block(c, rngs), rest, rngs)) if rest else None
        self.norm = norm(c, rngs)
        self.has_last_norm = last_norm
        if not last_norm:
            unread(self.norm)
        rename_dims(self)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """[images, patches, patch] to [images, patches, embed], after the class token's if any."""
        x = self.patches(patches.astype(self.positions.dtype))
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], axis=1)
        order = self.config.positions
        in_order = (order == np.arange(len(order))).all()
        x = x + (self.positions[...] if in_order else self.positions[...][order])
        x = x if self.first_norm is None else self.first_norm(x)
        x = scan_blocks(self.blocks, x, unroll=self.config.unroll)
        return self.norm(x) if self.has_last_norm else x


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    init, heads = normal(c.initializer_range), c.num_attention_heads
    head_dim = c.hidden_size // heads
    sizes = Projections(c.hidden_size, heads, heads, head_dim, init, bias=True, out_bias=True)
    activation = ACTIVATIONS[c.activation]
    return NormBefore(
        norm(c, rngs),
        Attention(sizes, causal=False, rngs=rngs),
        norm(c, rngs),
        FeedForward(c.hidden_size, c.intermediate_size, activation, init=init, rngs=rngs),
        nnx.Dropout(0.0),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.layer_norm_eps, rngs=rngs)


def images_of(patches: jax.Array, config: Config) -> jax.Array:
    """[batch, rows, patch] to [batch * images, patches, patch], spread over the devices."""
    batch, rows, patch = patches.shape
    if rows % config.num_patches or patch != config.patch:
        raise ValueError(
            f"patches are {list(patches.shape)}; an image has {config.num_patches} rows of "
            f"{config.patch} numbers"
        )
    images = batch * rows // config.num_patches
    return ops.spread_samples(patches.reshape(images, config.num_patches, patch))


def unread[Module: nnx.Module](module: Module) -> Module:
    """Make the parameters of a module unread weights, in place."""
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Module):
            for name, value in list(vars(node).items()):
                if isinstance(value, nnx.Param):
                    setattr(node, name, Unread(value.get_value()))
    return module


def rename_dims(module: nnx.Module) -> None:
    """Mark the dims of the parameters of a module as those of images, in place."""
    for _, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        names = leaf.get_metadata("logical_axes")
        shared = ("layers", "head_dim", "pos", "patch")
        leaf.set_metadata(
            "logical_axes",
            tuple(name if name in shared else OF_IMAGES + name for name in names),
        )
