"""Llama 3 (arXiv:2407.21783): RMSNorm, rotary positions, SwiGLU, grouped queries, no biases.

With fields for what Mistral, Qwen2 and Qwen3 add: a sliding window, biases, query and key norms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx
from flax.typing import Initializer

from jaxspeed import ops

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, swiglu
from .decoder import TINY, DecoderSizes, RotaryDecoder, WindowedSizes, rms_norm
from .layers import RMSNorm, dropout, normal


@dataclass(frozen=True)
class AttentionSizes(WindowedSizes):
    """Sizes of decoders with Llama's attention."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head, before the rotation


@dataclass(frozen=True)
class Config(AttentionSizes):
    """Llama's sizes; the defaults are those of Llama 3 8B."""

    mlp_bias: bool = False


def _long(config: Config) -> Config:
    """Llama 3.1: the same sizes, trained with a context of 128 Ki tokens."""
    return replace(config, max_position_embeddings=131072, rope_scaling=ops.RopeScaling())


_8B = Config()
_70B = Config(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672
)

PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY),
    "llama-100m": Config(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "llama3.2-1b": Config(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        intermediate_size=8192,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rope_scaling=ops.RopeScaling(factor=32.0),
    ),
    "llama3.2-3b": Config(
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        intermediate_size=8192,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rope_scaling=ops.RopeScaling(factor=32.0),
    ),
    "llama3-8b": _8B,
    "llama3-70b": _70B,
    "llama3.1-8b": _long(_8B),
    "llama3.1-70b": _long(_70B),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    return NormBefore(
        rms_norm(c, rngs),
        attention(c, rngs),
        rms_norm(c, rngs),
        GatedFeedForward(
            c.hidden_size,
            c.intermediate_size,
            swiglu,
            init=c.init,
            out_init=residual_init(c),
            bias=c.mlp_bias,
            rngs=rngs,
        ),
        dropout(c.dropout, rngs),
    )


def attention(config: AttentionSizes, rngs: nnx.Rngs) -> Attention:
    c = config

    def head_norm(dims: dict[str, int]) -> RMSNorm:
        return RMSNorm({"head_dim": dims["head_dim"]}, eps=c.rms_norm_eps, rngs=rngs)

    return Attention(
        c.projections(out_init=residual_init(c), bias=c.qkv_bias, out_bias=c.o_bias),
        qk_norm=head_norm if c.qk_norm else None,
        windows=c.windows,
        rngs=rngs,
    )


def residual_init(config: DecoderSizes) -> Initializer:
    """Output weights of branches, scaled as in GPT-2: Meta did not publish Llama's scheme."""
    return normal(config.initializer_range / (2 * config.num_hidden_layers) ** 0.5)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(
        config, block, rms_norm, rotaries=(config.rotary,), second=config.second, rngs=rngs
    )


loss = language.next_token_loss
objective = language.objective
