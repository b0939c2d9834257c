"""Seed-OSS (ByteDance, 2025): Llama's blocks with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from . import llama
from .decoder import TINY


@dataclass(frozen=True)
class Config(llama.Config):
    """Seed-OSS's sizes; the defaults are those of Seed-OSS 36B."""

    hidden_size: int = 5120
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    head_dim: int = 128
    intermediate_size: int = 27648
    vocab_size: int = 155136
    max_position_embeddings: int = 524288
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    qkv_bias: bool = True


PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, head_dim=24),
    "seed-oss-36b": Config(),
}
build = llama.build
loss = llama.loss
objective = llama.objective
