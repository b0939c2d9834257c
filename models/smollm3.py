"""SmolLM3 (Hugging Face, 2025): Llama's blocks, of which every fourth one has no rotation."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, of_kinds, swiglu
from .decoder import TINY, DecoderSizes, RotaryDecoder, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """SmolLM3's sizes; the defaults are those of SmolLM3 3B."""

    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    intermediate_size: int = 11008
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5000000.0
    unrotated_layers: tuple[int, ...] | None = None  # None: every fourth one, from the fourth
    unrotated_window: int | None = None  # of the layers without a rotation
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unrotated_layers is not None:
            object.__setattr__(self, "unrotated_layers", tuple(self.unrotated_layers))

    @property
    def is_unrotated(self) -> list[bool]:
        """[layers], whether a layer has no rotation."""
        layers = range(self.num_hidden_layers)
        chosen = layers[3::4] if self.unrotated_layers is None else self.unrotated_layers
        return [layer in chosen for layer in layers]


PRESETS: dict[str, Config] = {
    "tiny": Config(**{**TINY, "num_hidden_layers": 4}),
    "smollm3-3b": Config(),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        rms_norm(c, rngs),
        Attention(
            c.projections(bias=c.attention_bias, out_bias=c.attention_bias),
            windows=of_kinds(c.is_unrotated, None, c.unrotated_window),
            rngs=rngs,
        ),
        rms_norm(c, rngs),
        GatedFeedForward(
            c.hidden_size, c.intermediate_size, swiglu, init=c.init, bias=c.mlp_bias, rngs=rngs
        ),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(
        config,
        block,
        rms_norm,
        rotaries=(config.rotary, None),
        second=config.is_unrotated,
        rngs=rngs,
    )


loss = language.next_token_loss
objective = language.objective
