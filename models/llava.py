"""LLaVA 1.5 (arXiv:2310.03744): CLIP's features of one layer, and a projector of two layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from flax import nnx

from . import llama, vision, vision_language
from .blocks import ACTIVATIONS
from .decoder import TINY, DecoderSizes
from .layers import Linear, normal
from .vision_language import VisionLanguage

CLIP_L = vision.Config()
VICUNA_7B = llama.Config(
    num_key_value_heads=32,
    intermediate_size=11008,
    vocab_size=32064,
    max_position_embeddings=4096,
    rope_theta=10000.0,
)


@dataclass(frozen=True)
class Config(vision_language.Sizes):
    """Sizes of the parts; the defaults are those of LLaVA 1.5 7B."""

    text: DecoderSizes = VICUNA_7B
    vision: vision.Config = CLIP_L
    image_token_id: int = 32000
    feature_layer: int = -2  # of the tower's, of which 0 is the embeddings, and -1 the last
    class_features: bool = False  # whether the class token's are among an image's
    projector_activation: str = "gelu"
    projector_bias: bool = True

    def __post_init__(self) -> None:
        layers = self.vision.num_hidden_layers
        if not 0 < self.layers <= layers:
            raise ValueError(f"feature_layer {self.feature_layer} is none of {layers} layers")

    @property
    def layers(self) -> int:
        """Of the tower, whose output is read."""
        last = self.vision.num_hidden_layers + 1
        return self.feature_layer + last * (self.feature_layer < 0)

    @property
    def tokens_per_image(self) -> int:
        return self.vision.num_patches + (self.vision.is_clip and self.class_features)


PRESETS: dict[str, Config] = {
    "tiny": Config(
        text=llama.Config(**TINY),
        vision=vision.Config(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        ),
        image_token_id=255,
    ),
    "llava1.5-7b": Config(),
    "llava1.5-13b": Config(
        text=replace(
            VICUNA_7B,
            hidden_size=5120,
            num_hidden_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
            intermediate_size=13824,
        )
    ),
}


class Projector(nnx.Module):
    """out(activation(up(x))) of the features, without the class token's."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        init, embed = normal(c.text.initializer_range), {"embed": c.text.hidden_size}
        inputs = {vision.OF_IMAGES + "embed": c.vision.hidden_size}
        self.up = Linear(inputs, embed, init=init, bias=c.projector_bias, rngs=rngs)
        self.out = Linear(embed, embed, init=init, bias=c.projector_bias, rngs=rngs)
        self.activation = ACTIVATIONS[c.projector_activation]
        self.first = int(c.vision.is_clip and not c.class_features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.activation(self.up(x[:, self.first :])))


def build(config: Config, rngs: nnx.Rngs) -> VisionLanguage:
    c = config
    tower = vision.Tower(c.vision, layers=c.layers, last_norm=False, rngs=rngs)
    projector = Projector(c, rngs=rngs)
    return VisionLanguage(c, tower, projector, vision_language.text_model(c.text, rngs))


loss = vision_language.loss
objective = vision_language.objective
