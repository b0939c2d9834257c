"""SmolVLM (arXiv:2504.05299) and Idefics 3 (arXiv:2408.12637): SigLIP's features, shuffled.

The features of some neighbouring patches are one token. An image is divided into tiles of the
tower's size, with a small copy of it after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from . import llama, vision, vision_language
from .decoder import TINY, DecoderSizes
from .layers import Linear, normal
from .vision_language import VisionLanguage

SIGLIP = vision.Config(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    image_size=512,
    patch_size=16,
    activation="gelu_pytorch_tanh",
    layer_norm_eps=1e-6,
    is_clip=False,
    is_bucketed=True,
)
SMOLLM2_135M = llama.Config(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49280,
    max_position_embeddings=8192,
    rope_theta=1e5,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Config(vision_language.Sizes):
    """Sizes of the parts; the defaults are those of SmolVLM 256M."""

    text: DecoderSizes = SMOLLM2_135M
    vision: vision.Config = SIGLIP
    image_token_id: int = 49190
    scale_factor: int = 4  # patches of a side that are one token

    def __post_init__(self) -> None:
        if self.vision.side % self.scale_factor:
            raise ValueError(
                f"scale_factor {self.scale_factor} does not divide the {self.vision.side} patches "
                "of a side"
            )

    @property
    def tokens_per_image(self) -> int:
        """Of a tile."""
        return self.vision.num_patches // self.scale_factor**2


PRESETS: dict[str, Config] = {
    "tiny": Config(
        text=llama.Config(**TINY),
        vision=vision.Config(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            activation="gelu_pytorch_tanh",
            is_clip=False,
            is_bucketed=True,
        ),
        image_token_id=255,
        scale_factor=2,
    ),
    "smolvlm-256m": Config(),
}


class Projector(nnx.Module):
    """The features of squares of neighbouring patches, row by row, times a matrix."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, n = config, config.scale_factor
        init = normal(c.text.initializer_range)
        inputs = {vision.OF_IMAGES + "embed": c.vision.hidden_size * n * n}
        embed = {"embed": c.text.hidden_size}
        self.proj = Linear(inputs, embed, init=init, bias=False, rngs=rngs)
        self.side, self.scale_factor = c.vision.side, n

    def __call__(self, x: jax.Array) -> jax.Array:
        images, _, embed = x.shape
        n, count = self.scale_factor, self.side // self.scale_factor
        x = x.reshape(images, count, n, count, n, embed).swapaxes(2, 3)
        return self.proj(x.reshape(images, count * count, n * n * embed))


def build(config: Config, rngs: nnx.Rngs) -> VisionLanguage:
    c = config
    tower, projector = vision.Tower(c.vision, rngs=rngs), Projector(c, rngs=rngs)
    return VisionLanguage(c, tower, projector, vision_language.text_model(c.text, rngs))


loss = vision_language.loss
objective = vision_language.objective
