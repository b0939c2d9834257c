"""StarCoder 2 (arXiv:2402.19173): LayerNorm, biases, gelu, and rotary positions with a window."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from . import language
from .blocks import Attention, FeedForward, NormBefore, gelu
from .decoder import TINY, DecoderSizes, RotaryDecoder
from .layers import LayerNorm, dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """StarCoder 2's sizes; the defaults are those of StarCoder 2 3B."""

    hidden_size: int = 3072
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    intermediate_size: int = 12288
    vocab_size: int = 49152
    max_position_embeddings: int = 16384
    rms_norm_eps: float = 1e-5  # of LayerNorm
    rope_theta: float = 999999.4420358813
    initializer_range: float = 0.018042
    sliding_window: int | None = 4096
    use_bias: bool = True
    tie_word_embeddings: bool = True


PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, sliding_window=16),
    "starcoder2-3b": Config(),
    "starcoder2-15b": replace(
        Config(),
        hidden_size=6144,
        num_hidden_layers=40,
        num_attention_heads=48,
        num_key_value_heads=4,
        intermediate_size=24576,
        rope_theta=100000.0,
        tie_word_embeddings=False,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        norm(c, rngs),
        Attention(
            c.projections(bias=c.use_bias, out_bias=c.use_bias),
            windows=(c.sliding_window,),
            rngs=rngs,
        ),
        norm(c, rngs),
        FeedForward(
            c.hidden_size, c.intermediate_size, gelu, init=c.init, bias=c.use_bias, rngs=rngs
        ),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.rms_norm_eps, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(config, block, norm, rotaries=(config.rotary,), rngs=rngs)


loss = language.next_token_loss
objective = language.objective
