"""Ministral (Mistral AI, 2024): Llama's blocks with a sliding window, in all layers or in some."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, of_kinds, swiglu
from .decoder import DecoderSizes, RotaryDecoder, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """Ministral's sizes; the defaults are those of Ministral 8B."""

    num_hidden_layers: int = 36
    intermediate_size: int = 12288
    vocab_size: int = 131072
    max_position_embeddings: int = 32768
    rope_theta: float = 100000000.0
    sliding_window: int = 32768
    global_layers: tuple[int, ...] = ()  # those without the window

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "global_layers", tuple(self.global_layers))

    @property
    def is_global(self) -> list[bool]:
        """[layers], whether a layer sees all tokens before."""
        return [layer in self.global_layers for layer in range(self.num_hidden_layers)]


PRESETS: dict[str, Config] = {
    "tiny": Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=256,
        max_position_embeddings=128,
        sliding_window=16,
        global_layers=(0,),
    ),
    "ministral-8b": Config(),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        rms_norm(c, rngs),
        Attention(
            c.projections(), windows=of_kinds(c.is_global, c.sliding_window, None), rngs=rngs
        ),
        rms_norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(
        config, block, rms_norm, rotaries=(config.rotary,), second=config.is_global, rngs=rngs
    )


loss = language.next_token_loss
