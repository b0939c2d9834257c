"""AFM (Arcee, 2025): Llama's blocks with a feed-forward of relu squared, which has no gate."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from . import language
from .blocks import Attention, FeedForward, NormBefore, relu2
from .decoder import TINY, DecoderSizes, RotaryDecoder, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """AFM's sizes; the defaults are those of AFM 4.5B."""

    hidden_size: int = 2560
    num_hidden_layers: int = 36
    num_attention_heads: int = 20
    num_key_value_heads: int = 4
    intermediate_size: int = 18432
    vocab_size: int = 128004
    max_position_embeddings: int = 65536
    rope_theta: float = 10000.0
    attention_bias: bool = False
    mlp_bias: bool = False


PRESETS: dict[str, Config] = {"tiny": Config(**TINY), "afm-4.5b": Config()}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        rms_norm(c, rngs),
        Attention(c.projections(bias=c.attention_bias, out_bias=c.attention_bias), rngs=rngs),
        rms_norm(c, rngs),
        FeedForward(
            c.hidden_size, c.intermediate_size, relu2, init=c.init, bias=c.mlp_bias, rngs=rngs
        ),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(config, block, rms_norm, rotaries=(config.rotary,), rngs=rngs)


loss = language.next_token_loss
objective = language.objective
