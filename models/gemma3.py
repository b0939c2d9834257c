"""Gemma 3 with images (arXiv:2503.19786): SigLIP's features, pooled and normalized.

Tokens of an image see all of it. No kernel has such a mask, so that batches with images materialize
the scores of the language model's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from . import gemma, vision, vision_language
from .decoder import DecoderSizes
from .layers import RMSNorm, normal, param
from .vision_language import VisionLanguage

SIGLIP = vision.Config(
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=27,
    image_size=896,
    activation="gelu_pytorch_tanh",
    layer_norm_eps=1e-6,
    is_clip=False,
)
GEMMA3_4B = gemma.Config(
    hidden_size=2560,
    num_hidden_layers=34,
    intermediate_size=10240,
    vocab_size=262208,
    max_position_embeddings=131072,
    rope_theta=1e6,
    rope_local_theta=1e4,
    sliding_window=1024,
    global_layers=tuple(range(5, 34, 6)),
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    qk_norm=True,
)


@dataclass(frozen=True)
class Config(vision_language.Sizes):
    """Sizes of the parts; the defaults are those of Gemma 3 4B, but for the scale of positions."""

    SEES_IMAGES_ENTIRE: ClassVar[bool] = True

    text: DecoderSizes = GEMMA3_4B
    vision: vision.Config = SIGLIP
    image_token_id: int = 262144
    begin_token_id: int = 255999  # before and after an image's tokens
    end_token_id: int = 256000
    mm_tokens_per_image: int = 256

    def __post_init__(self) -> None:
        side = round(self.mm_tokens_per_image**0.5)
        if side**2 != self.mm_tokens_per_image or self.vision.side < side:
            raise ValueError(
                f"mm_tokens_per_image is {self.mm_tokens_per_image}; it needs a square of at most "
                f"{self.vision.num_patches}"
            )

    @property
    def pooled(self) -> int:
        """Patches of a row, and rows of patches, that are one token."""
        return self.vision.side // round(self.mm_tokens_per_image**0.5)

    @property
    def tokens_per_image(self) -> int:
        return (self.vision.side // self.pooled) ** 2


PRESETS: dict[str, Config] = {
    "tiny": Config(
        text=gemma.PRESETS["tiny3"],
        vision=vision.Config(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=2,
            activation="gelu_pytorch_tanh",
            is_clip=False,
        ),
        image_token_id=255,
        begin_token_id=254,
        end_token_id=253,
        mm_tokens_per_image=16,
    ),
    "gemma3-4b": Config(),
}


class Projector(nnx.Module):
    """norm(mean of patches) W."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, embed = config, {vision.OF_IMAGES + "embed": config.vision.hidden_size}
        self.norm = RMSNorm(embed, eps=c.vision.layer_norm_eps, offset=1.0, rngs=rngs)
        init = normal(c.text.initializer_range)
        self.kernel = param(rngs, init, embed | {"embed": c.text.hidden_size})
        self.side, self.pooled = c.vision.side, c.pooled

    def __call__(self, x: jax.Array) -> jax.Array:
        images, _, embed = x.shape
        count, n = self.side // self.pooled, self.pooled
        x = x.reshape(images, self.side, self.side, embed)[:, : count * n, : count * n]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        means = jnp.mean(wide.reshape(images, count, n, count, n, embed), axis=(2, 4))
        x = self.norm(means.reshape(images, count * count, embed).astype(x.dtype))
        return jnp.einsum("ite,ed->itd", x, self.kernel[...].astype(x.dtype))


def build(config: Config, rngs: nnx.Rngs) -> VisionLanguage:
    c = config
    tower, projector = vision.Tower(c.vision, rngs=rngs), Projector(c, rngs=rngs)
    return VisionLanguage(c, tower, projector, vision_language.text_model(c.text, rngs))


loss = vision_language.loss
objective = vision_language.objective
