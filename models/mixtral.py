"""Mixtral (arXiv:2401.04088) and Qwen3-MoE (arXiv:2505.09388): Llama's blocks with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from . import mixture
from .decoder import TINY, rms_norm
from .layers import dropout
from .llama import AttentionSizes, attention, residual_init
from .mixture import Experts, MixtureBlock, MixtureDecoder, MixtureSizes


@dataclass(frozen=True)
class Config(MixtureSizes, AttentionSizes):
    """Sizes; the defaults are those of Mixtral 8x7B. `intermediate_size` is an expert's."""

    vocab_size: int = 32000
    max_position_embeddings: int = 32768
    rope_theta: float = 1000000.0
    norm_topk_prob: bool = True  # the weights of a token's experts have the sum 1
    routed_scaling_factor: float = 1.0  # of these weights, as DeepSeek's

    @property
    def routing(self) -> dict[str, Any]:
        return {
            **super().routing,
            "renormalize": self.norm_topk_prob,
            "scale": self.routed_scaling_factor,
        }


_8X7B = Config()
_QWEN3 = replace(
    _8X7B,
    hidden_size=2048,
    num_hidden_layers=48,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=768,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    qk_norm=True,
    num_experts=128,
    num_experts_per_tok=8,
)

PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, num_experts=4),
    "mixtral-8x7b": _8X7B,
    "mixtral-8x22b": replace(
        _8X7B,
        hidden_size=6144,
        num_hidden_layers=56,
        num_attention_heads=48,
        intermediate_size=16384,
        max_position_embeddings=65536,
    ),
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-235b-a22b": replace(
        _QWEN3,
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        intermediate_size=1536,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> MixtureBlock:
    c = config
    return MixtureBlock(
        rms_norm(c, rngs),
        attention(c, rngs),
        rms_norm(c, rngs),
        Experts(c, c.intermediate_size, out_init=residual_init(c), rngs=rngs),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> MixtureDecoder:
    return MixtureDecoder(
        config, block, rms_norm, rotaries=(config.rotary,), second=config.second, rngs=rngs
    )


loss = mixture.loss
objective = mixture.objective
