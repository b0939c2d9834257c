"""Qwen2.5-VL (arXiv:2502.13923): images of any size, windows, and positions of rows and columns.

Patches come in squares that are one token each, row by row. Most layers of the tower see a window,
some an entire image. A token of an image has a row and a column in the language model's rotations;
text after it continues from the largest of its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspeed import ops

from . import llama, vision_language
from .blocks import ACTIVATIONS, Attention, GatedFeedForward, NormBefore, Projections, exact_gelu
from .decoder import TINY, DecoderSizes
from .layers import Linear, RMSNorm, check_heads, normal, param, scan_blocks, stacked
from .vision import OF_IMAGES, rename_dims
from .vision_language import VisionLanguage

THETA, EPS = 10000.0, 1e-6  # of the tower


@dataclass(frozen=True)
class TowerConfig:
    """Sizes of a tower; the defaults are those of Qwen2.5-VL 3B."""

    hidden_size: int = 1280
    intermediate_size: int = 3420
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    patch_size: int = 14
    num_channels: int = 3
    frames: int = 2  # of a patch: an image has the same one in all
    merged: int = 2  # patches of a side of a square that is one token
    window_size: int = 112  # pixels
    full_layers: tuple[int, ...] = (7, 15, 23, 31)  # that see an entire image
    activation: str = "silu"
    initializer_range: float = 0.02
    unroll: int | bool = 1  # of the scan over layers

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_attention_heads)
        object.__setattr__(self, "full_layers", tuple(self.full_layers))
        if self.window_size < self.patch_size * self.merged or self.head_dim % 4:
            raise ValueError(
                f"window_size {self.window_size} holds no square of patches, or heads of "
                f"{self.head_dim} dims have no quarters"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch(self) -> int:
        return self.patch_size**2 * self.num_channels

    @property
    def window(self) -> int:
        """Patches of a window's side: of complete squares."""
        return self.window_size // self.merged // self.patch_size * self.merged


TOWER = TowerConfig()
QWEN2_5_3B = llama.Config(
    hidden_size=2048,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    intermediate_size=11008,
    vocab_size=151936,
    max_position_embeddings=128000,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    qkv_bias=True,
)


@dataclass(frozen=True)
class Config(vision_language.Sizes):
    """Sizes of the parts; the defaults are those of Qwen2.5-VL 3B."""

    text: DecoderSizes = QWEN2_5_3B
    vision: Any = TOWER
    image_token_id: int = 151655
    sections: tuple[int, ...] = (16, 24, 24)  # of frequencies: time, row, column

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(self.sections))
        if len(self.sections) != 3 or sum(self.sections) != self.text.rotary.dims // 2:
            raise ValueError(
                f"sections are {self.sections}; three with {self.text.rotary.dims // 2} "
                "frequencies together are needed"
            )

    @property
    def tokens_per_image(self) -> int:
        raise AttributeError("images of any size have any number of tokens")

    @property
    def axes(self) -> np.ndarray:
        """Of each frequency: 0 time, 1 row, 2 column."""
        return np.repeat(np.arange(3), self.sections)


PRESETS: dict[str, Config] = {
    "tiny": Config(
        text=llama.Config(**TINY, qkv_bias=True),
        vision=TowerConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            patch_size=4,
            window_size=16,
            full_layers=(1,),
        ),
        image_token_id=255,
        sections=(2, 3, 3),
    ),
    "qwen2.5-vl-3b": Config(),
}


class TowerAttention(Attention):
    """Attention to the patches of a window, or of an image."""

    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        rotations: Sequence[ops.Rotation],
        windows: jax.Array,
        images: jax.Array,
        is_full: jax.Array,
    ) -> jax.Array:
        return super().__call__(x, rotations, jnp.where(is_full, images, windows))


def block(config: TowerConfig, rngs: nnx.Rngs) -> NormBefore:
    c = config
    init, heads = normal(c.initializer_range), c.num_attention_heads
    sizes = Projections(c.hidden_size, heads, heads, c.head_dim, init, bias=True, out_bias=True)
    activation = ACTIVATIONS[c.activation]

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up

    return NormBefore(
        norm(c, rngs),
        TowerAttention(sizes, causal=False, rngs=rngs),
        norm(c, rngs),
        GatedFeedForward(
            c.hidden_size, c.intermediate_size, gated, init=init, bias=True, rngs=rngs
        ),
        nnx.Dropout(0.0),
    )


def norm(config: TowerConfig, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm({"embed": config.hidden_size}, eps=EPS, rngs=rngs)


class Tower(nnx.Module):
    """Embeddings of patches, and stacked blocks with rotary rows and columns."""

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        sizes = {"frames": c.frames, "patch": c.patch, "embed": c.hidden_size}
        self.patches = param(rngs, normal(c.initializer_range), sizes)
        self.blocks = stacked(lambda rngs: block(c, rngs), c.num_hidden_layers, rngs)
        rename_dims(self)

    def __call__(self, patches: jax.Array, places: jax.Array) -> jax.Array:
        """[batch, rows, patch] and their places [batch, rows, 3] to [batch, rows, embed]."""
        c, kernel = self.config, self.patches[...]
        x = jnp.einsum("brp,pe->bre", patches.astype(kernel.dtype), kernel.sum(0))
        image, row, column = (places[..., i] for i in range(3))
        windows = ((image * 4096 + row // c.window) * 4096 + column // c.window).astype(jnp.int32)
        rates = ops.frequencies(c.head_dim // 2, THETA)
        angles = jnp.concatenate(
            [(at[..., None] * jnp.asarray(rates, jnp.float32)) for at in (row, column)], axis=-1
        )[..., None, :]
        rotations = (ops.Rotation(jnp.cos(angles), jnp.sin(angles)),)
        full = jnp.asarray([layer in c.full_layers for layer in range(c.num_hidden_layers)])
        return scan_blocks(self.blocks, x, rotations, windows, image, each=(full,), unroll=c.unroll)


class Merger(nnx.Module):
    """down(gelu(up(norm of the patches of a square)))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, v = config, config.vision
        init, size = normal(c.text.initializer_range), v.hidden_size * v.merged**2
        self.norm = norm(v, rngs)
        rename_dims(self)
        inner = {OF_IMAGES + "embed": size}
        self.up = Linear(inner, inner, init=init, rngs=rngs)
        self.down = Linear(inner, {"embed": c.text.hidden_size}, init=init, rngs=rngs)
        self.merged = v.merged**2

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, rows, embed = x.shape
        x = self.norm(x).reshape(batch, rows // self.merged, embed * self.merged)
        return self.down(exact_gelu(self.up(x)))


class QwenVL(VisionLanguage):
    """With a cache, `offset` [rows] is by how much rotations are behind the number of tokens."""

    offset: nnx.Cache[jax.Array] | None = None

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        super().init_cache(rows, length, dtype)
        self.offset = nnx.Cache(jnp.zeros(rows, jnp.int32))

    def features(self, patches: jax.Array, patch_places: jax.Array | None = None) -> jax.Array:
        assert patch_places is not None, "of images of any size"
        features: jax.Array = self.projector(self.tower(patches, patch_places))
        return features

    def positions_of(
        self, image_rows: jax.Array, patch_places: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        """[batch, seq, 3]: each text token is 1 after the largest position before it."""
        n = self.config.vision.merged
        squares = patch_places[:, :: n * n]
        at = jnp.take_along_axis(squares, jnp.clip(image_rows, 0)[..., None], axis=1, mode="clip")
        is_image = image_rows >= 0
        image = jnp.where(is_image, at[..., 0], -1)
        row, column = at[..., 1] // n, at[..., 2] // n
        following = jnp.concatenate([image[:, 1:], jnp.full_like(image[:, :1], -2)], axis=1)
        of_last = jnp.where(image != following, jnp.maximum(row, column) + 1, 0)
        steps = jnp.where(is_image, of_last, 1)
        places = jnp.cumsum(steps, axis=1) - steps
        if segment_ids is not None:
            before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
            begins = jnp.where(segment_ids != before, places, 0)
            places = places - lax.cummax(begins, axis=1)
        inside = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
        return places[..., None] + jnp.where(is_image[..., None], inside, 0)

    def rotated_at(
        self, image_positions: jax.Array | None, positions: jax.Array | None
    ) -> jax.Array | None:
        if image_positions is not None:
            if self.offset is not None:
                behind = image_positions[:, -1, 0] - (image_positions.shape[1] - 1)
                self.offset.set_value(behind.astype(jnp.int32))
            return image_positions[..., self.config.axes]
        if self.offset is None or positions is None:
            return None
        return positions + self.offset.get_value()[:, None]


def build(config: Config, rngs: nnx.Rngs) -> QwenVL:
    c = config
    tower, merger = Tower(c.vision, rngs=rngs), Merger(c, rngs=rngs)
    return QwenVL(c, tower, merger, vision_language.text_model(c.text, rngs))


loss = vision_language.loss
objective = vision_language.objective
