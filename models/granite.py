"""Granite 3 (IBM, 2024): Llama's blocks with four multipliers, as muP has them (arXiv:2203.03466).

They scale the embeddings, the scores, what a branch adds to the residual stream, and the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, Scaled, swiglu
from .decoder import TINY, DecoderSizes, RotaryDecoder, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """Granite's sizes; the defaults are those of Granite 3.3 2B."""

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    intermediate_size: int = 8192
    vocab_size: int = 49159
    max_position_embeddings: int = 131072
    rope_theta: float = 10000000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 12.0
    attention_multiplier: float = 0.015625  # of the scores, in place of 1 / sqrt(head_dim)
    residual_multiplier: float = 0.22
    logits_scaling: float = 8.0  # a divisor
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.logits_scaling:
            raise ValueError("logits_scaling is 0; logits are divided by it")


_2B = Config()

PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, attention_multiplier=0.0625),
    "granite3.3-2b": _2B,
    "granite3.3-8b": replace(
        _2B,
        hidden_size=4096,
        intermediate_size=12800,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        rms_norm(c, rngs),
        Attention(
            c.projections(bias=c.attention_bias, out_bias=c.attention_bias),
            scale=c.attention_multiplier,
            rngs=rngs,
        ),
        rms_norm(c, rngs),
        GatedFeedForward(
            c.hidden_size, c.intermediate_size, swiglu, init=c.init, bias=c.mlp_bias, rngs=rngs
        ),
        Scaled(dropout(c.dropout, rngs), c.residual_multiplier),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(
        config,
        block,
        rms_norm,
        rotaries=(config.rotary,),
        embed_scale=config.embedding_multiplier,
        hidden_scale=1.0 / config.logits_scaling,
        rngs=rngs,
    )


loss = language.next_token_loss
objective = language.objective
