"""Llama 3 (arXiv:2407.21783): RMSNorm, rotary positions, SwiGLU, grouped queries, no biases.

With fields for what Mistral, Qwen2 and Qwen3 add: a sliding window, biases, query and key norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops

from . import language
from .cached_attention import CachedAttention
from .layers import Embedding, Linear, RMSNorm, check_heads, dropout, normal, scan_blocks, stacked


@dataclass(frozen=True)
class Config:
    """Llama's sizes; the defaults are those of Llama 3 8B."""

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    vocab_size: int = 128256
    max_position_embeddings: int = 8192  # trained context length; no array has this size
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: ops.Scaling | None = None  # or a mapping of its fields and rope_type
    sliding_window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head, before the rotation
    initializer_range: float = 0.02
    dropout: float = 0.0
    tie_word_embeddings: bool = False
    unroll: int | bool = 1  # of the scan over layers
    vocab_chunk: int | None = None  # columns of the head per chunk in the loss; None: automatic

    def __post_init__(self) -> None:
        width = self.size_of_head * self.num_attention_heads if self.head_dim else self.hidden_size
        check_heads(width, self.num_attention_heads, self.num_key_value_heads)
        scaling: Any = self.rope_scaling
        if isinstance(scaling, Mapping):
            object.__setattr__(self, "rope_scaling", ops.rope_scaling(scaling))
        ops.frequencies(self.size_of_head, self.rope_theta, self.rope_scaling)  # or an error

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)


def _long(config: Config) -> Config:
    """Llama 3.1: the same sizes, trained with a context of 128 Ki tokens."""
    return replace(config, max_position_embeddings=131072, rope_scaling=ops.RopeScaling())


_8B = Config()
_70B = Config(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672
)

PRESETS: dict[str, Config] = {
    "tiny": Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=256,
        max_position_embeddings=128,
    ),
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


class LlamaAttention(CachedAttention):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed = {"embed": c.hidden_size}
        heads = {"heads": c.num_attention_heads, "head_dim": c.size_of_head}
        kv_heads = {"kv_heads": c.num_key_value_heads, "head_dim": c.size_of_head}
        init = normal(c.initializer_range)
        self.q_proj = Linear(embed, heads, init=init, bias=c.qkv_bias, rngs=rngs)
        self.k_proj = Linear(embed, kv_heads, init=init, bias=c.qkv_bias, rngs=rngs)
        self.v_proj = Linear(embed, kv_heads, init=init, bias=c.qkv_bias, rngs=rngs)
        self.o_proj = Linear(heads, embed, init=residual_init(c), bias=c.o_bias, rngs=rngs)
        self.window = c.sliding_window

        self.q_norm = head_norm(c, rngs) if c.qk_norm else None
        self.k_norm = head_norm(c, rngs) if c.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        rotation: ops.Rotation,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
    ) -> jax.Array:
        q, k = self.q_proj(x), self.k_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = checkpoint_name(ops.rotate(q, rotation), "query")
        k = checkpoint_name(ops.rotate(k, rotation), "key")
        v = checkpoint_name(self.v_proj(x), "value")  # [batch, seq, kv_heads, head_dim]
        return self.o_proj(
            self.attend(q, k, v, positions, window=self.window, segment_ids=segment_ids),
        )


def head_norm(config: Config, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(config.size_of_head, eps=config.rms_norm_eps, dim="head_dim", rngs=rngs)


@ops.saves_inputs
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


class LlamaMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed, mlp = {"embed": c.hidden_size}, {"mlp": c.intermediate_size}
        init = normal(c.initializer_range)
        self.gate = Linear(embed, mlp, init=init, bias=c.mlp_bias, rngs=rngs)
        self.up = Linear(embed, mlp, init=init, bias=c.mlp_bias, rngs=rngs)
        self.down = Linear(mlp, embed, init=residual_init(c), bias=c.mlp_bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = checkpoint_name(self.gate(x), "mlp_gate"), checkpoint_name(self.up(x), "mlp_up")
        return self.down(checkpoint_name(swiglu(gate, up), "mlp_hidden"))


class LlamaBlock(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attn_norm = RMSNorm(size, eps=eps, rngs=rngs)
        self.attn = LlamaAttention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(size, eps=eps, rngs=rngs)
        self.mlp = LlamaMLP(config, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        rotation: ops.Rotation,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        attended = self.attn(normed, rotation, segment_ids, positions)
        x = x + self.dropout(checkpoint_name(attended, "attn_out"))
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + self.dropout(self.mlp(normed))


class Llama(language.Decoder):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        init = normal(c.initializer_range)
        self.embed = Embedding(c.vocab_size, c.hidden_size, init=init, rngs=rngs)
        self.blocks = stacked(lambda rngs: LlamaBlock(c, rngs=rngs), c.num_hidden_layers, rngs)
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, rngs=rngs)
        self.head = (
            None
            if c.tie_word_embeddings
            else Embedding(c.vocab_size, c.hidden_size, init=init, rngs=rngs)
        )

    def hidden(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """tokens [batch, seq] to the head's input, [batch, seq, embed]."""
        c = self.config
        read = jnp.arange(tokens.shape[1]) if positions is None else positions
        freqs = ops.frequencies(c.size_of_head, c.rope_theta, c.rope_scaling)
        rotation = ops.rotation(read, freqs, c.rope_scaling)  # once, for all layers
        x = self.embed(tokens)
        x = scan_blocks(self.blocks, x, rotation, segment_ids, positions, unroll=c.unroll)
        return self.norm(x)


def residual_init(config: Config) -> Initializer:
    """Output weights of branches, scaled as in GPT-2: Meta did not publish Llama's scheme."""
    return normal(config.initializer_range / (2 * config.num_hidden_layers) ** 0.5)


def build(config: Config, rngs: nnx.Rngs) -> Llama:
    return Llama(config, rngs=rngs)


def loss(model: Llama, batch: language.LanguageBatch) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of next-token cross-entropy; see `jaxspeed.models.language`."""
    return language.next_token_loss(model, batch)
