"""Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905): Llama's blocks, fused in their files.

Phi-4 mini (arXiv:2503.01743) rotates three quarters of each head, and ties its head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, swiglu
from .decoder import TINY, DecoderSizes, RotaryDecoder, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """Phi's sizes; the defaults are those of Phi-3 mini with a context of 4,096 tokens."""

    hidden_size: int = 3072
    num_key_value_heads: int = 32
    intermediate_size: int = 8192
    vocab_size: int = 32064
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0  # of the dims of a head
    sliding_window: int | None = None


_MINI = Config()

PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, partial_rotary_factor=0.75),
    "phi3-mini-4k": replace(_MINI, sliding_window=2047),
    "phi4": replace(
        _MINI,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        intermediate_size=17920,
        vocab_size=100352,
        max_position_embeddings=16384,
        rope_theta=250000.0,
    ),
    "phi4-mini": replace(
        _MINI,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=200064,
        partial_rotary_factor=0.75,
        sliding_window=262144,
        tie_word_embeddings=True,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        rms_norm(c, rngs),
        Attention(c.projections(), windows=(c.sliding_window,), rngs=rngs),
        rms_norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(config, block, rms_norm, rotaries=(config.rotary,), rngs=rngs)


loss = language.next_token_loss
objective = language.objective
