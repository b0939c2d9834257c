"""Vision Transformer (Dosovitskiy et al., arXiv:2010.11929), with DeiT's initialization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import classification
from .blocks import Attention, FeedForward, NormBefore, Projections, exact_gelu
from .classification import class_loss
from .layers import (
    LayerNorm,
    Linear,
    check_heads,
    dropout,
    param,
    scan_blocks,
    stacked,
    truncated_normal,
    zeros,
)


@dataclass(frozen=True)
class Config:
    """ViT's sizes; the defaults are those of ViT-B/16 for ImageNet."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None  # None: 4 * hidden_size
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_classes: int = 1000
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    dropout: float = 0.0
    label_smoothing: float = 0.0
    unroll: int | bool = 1  # of the scan over layers

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_attention_heads)
        if self.patch_size < 1 or self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size {self.patch_size} does not divide image_size {self.image_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


PRESETS: dict[str, Config] = {
    "tiny": Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_classes=10,
    ),
    "vit-ti16": Config(hidden_size=192, num_attention_heads=3),
    "vit-s16": Config(hidden_size=384, num_attention_heads=6),
    "vit-b16": Config(),
    "vit-l16": Config(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
    "vit-h14": Config(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, patch_size=14
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    init = truncated_normal(c.initializer_range)
    mlp = c.intermediate_size or 4 * c.hidden_size
    heads = c.num_attention_heads
    sizes = Projections(c.hidden_size, heads, heads, c.head_dim, init, bias=True, out_bias=True)
    return NormBefore(
        norm(c, rngs),
        Attention(sizes, causal=False, rngs=rngs),
        norm(c, rngs),
        FeedForward(c.hidden_size, mlp, exact_gelu, init=init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.layer_norm_eps, rngs=rngs)


class ViT(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        init = truncated_normal(c.initializer_range)
        pixels = {"patch": c.patch_size * c.patch_size * c.num_channels}
        embed = {"embed": c.hidden_size}
        self.patches = Linear(pixels, embed, init=init, rngs=rngs)
        self.class_token = param(rngs, zeros, embed)
        self.positions = param(rngs, init, {"pos": 1 + c.num_patches} | embed)
        self.dropout = dropout(c.dropout, rngs)
        self.blocks = stacked(lambda rngs: block(c, rngs), c.num_hidden_layers, rngs)
        self.norm = norm(c, rngs)
        self.head = Linear(embed, {"classes": c.num_classes}, init=init, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        x = self.patches(split_into_patches(images, self.config.patch_size, self.positions.dtype))
        class_token = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([class_token, x], axis=1) + self.positions[...]
        x = scan_blocks(self.blocks, self.dropout(x), unroll=self.config.unroll)
        return self.head(self.norm(x[:, 0]))  # rows are normalized independently


def split_into_patches(images: jax.Array, size: int, dtype: jnp.dtype) -> jax.Array:
    """[batch, height, width, channels] to [batch, patches, size * size * channels], row by row."""
    batch, height, width, channels = images.shape
    x = images.astype(dtype).reshape(batch, height // size, size, width // size, size, channels)
    return x.swapaxes(2, 3).reshape(batch, -1, size * size * channels)


def build(config: Config, rngs: nnx.Rngs) -> ViT:
    return ViT(config, rngs=rngs)


def loss(model: ViT, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
    """(sum, weight) of the cross-entropy of `labels` [batch] given `images`.

    In evaluation also the accuracy: see `jaxspeed.models.classification`.
    """
    smoothing = model.config.label_smoothing
    return class_loss(model(batch["images"]), batch["labels"], train, label_smoothing=smoothing)


objective = classification.objective
