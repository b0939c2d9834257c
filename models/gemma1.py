"""Gemma 1 (arXiv:2403.08295): Llama's blocks with GeGLU, and scaled embeddings.

Norms store their scale without 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, geglu
from .decoder import TINY, DecoderSizes, RotaryDecoder
from .layers import RMSNorm, dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """Gemma's sizes; the defaults are those of Gemma 2B."""

    hidden_size: int = 2048
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    intermediate_size: int = 16384
    vocab_size: int = 256000
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = True


PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, head_dim=16),
    "gemma-2b": Config(),
    "gemma-7b": replace(
        Config(),
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=24576,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        norm(c, rngs),
        Attention(c.projections(bias=c.attention_bias, out_bias=c.attention_bias), rngs=rngs),
        norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, geglu, init=c.init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> RMSNorm:
    dims = {"embed": config.hidden_size}
    return RMSNorm(dims, eps=config.rms_norm_eps, offset=1.0, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(
        config,
        block,
        norm,
        rotaries=(config.rotary,),
        embed_scale=config.hidden_size**0.5,
        rngs=rngs,
    )


loss = language.next_token_loss
objective = language.objective
