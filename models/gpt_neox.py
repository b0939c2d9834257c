"""GPT-NeoX (arXiv:2204.06745) and Pythia: attention and feed-forward side by side, LayerNorm."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from . import language
from .blocks import Attention, FeedForward, NormBefore, ParallelBranches, exact_gelu
from .decoder import TINY, DecoderSizes, RotaryDecoder
from .layers import LayerNorm, dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """GPT-NeoX's sizes; the defaults are those of Pythia 1.4B."""

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    intermediate_size: int = 8192
    vocab_size: int = 50304
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5  # of LayerNorm
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25  # of the dims of a head
    attention_bias: bool = True
    parallel_residual: bool = True


PRESETS: dict[str, Config] = {
    "tiny": Config(**{**TINY, "num_key_value_heads": 4, "intermediate_size": 256}),
    "pythia-1.4b": Config(),
    "pythia-6.9b": replace(
        Config(),
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=16384,
        vocab_size=50432,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return (ParallelBranches if c.parallel_residual else NormBefore)(
        norm(c, rngs),
        Attention(c.projections(bias=c.attention_bias, out_bias=c.attention_bias), rngs=rngs),
        norm(c, rngs),
        FeedForward(c.hidden_size, c.intermediate_size, exact_gelu, init=c.init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.rms_norm_eps, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(config, block, norm, rotaries=(config.rotary,), rngs=rngs)


loss = language.next_token_loss
objective = language.objective
