"""GPT-2 (Radford et al., 2019), and GPT-3 (arXiv:2005.14165), which has its architecture.

Learned positions, LayerNorm before each branch, gelu in its tanh form, a head tied to the
embedding. Dropout is on the embedding and on each branch; not on attention weights, which fused
kernels do not materialize.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops

from . import language
from .cached_attention import CachedAttention
from .layers import (
    Embedding,
    LayerNorm,
    Linear,
    check_heads,
    dropout,
    normal,
    scan_blocks,
    stacked,
)


@dataclass(frozen=True)
class Config:
    """GPT-2's sizes; the defaults are those of the smallest, with 124 million parameters."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None  # for grouped-query attention; None: as query heads
    intermediate_size: int | None = None  # None: 4 * hidden_size
    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    unroll: int | bool = 1  # of the scan over layers
    vocab_chunk: int | None = None  # columns of the head per chunk in the loss; None: automatic

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_attention_heads, self.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


PRESETS: dict[str, Config] = {
    "tiny": Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=128,
    ),
    "gpt2": Config(),
    "gpt2-medium": Config(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
    "gpt2-large": Config(hidden_size=1280, num_hidden_layers=36, num_attention_heads=20),
    "gpt2-xl": Config(hidden_size=1600, num_hidden_layers=48, num_attention_heads=25),
    "gpt3-175b": Config(
        hidden_size=12288,
        num_hidden_layers=96,
        num_attention_heads=96,
        max_position_embeddings=2048,
    ),
}


class GPT2Attention(CachedAttention):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed = {"embed": c.hidden_size}
        heads = {"heads": c.num_attention_heads, "head_dim": c.head_dim}
        kv_heads = {
            "kv_heads": c.num_key_value_heads or c.num_attention_heads,
            "head_dim": c.head_dim,
        }
        init = normal(c.initializer_range)
        self.q_proj = Linear(embed, heads, init=init, rngs=rngs)
        self.k_proj = Linear(embed, kv_heads, init=init, rngs=rngs)
        self.v_proj = Linear(embed, kv_heads, init=init, rngs=rngs)
        self.o_proj = Linear(heads, embed, init=residual_init(c), rngs=rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, positions: jax.Array | None
    ) -> jax.Array:
        q = checkpoint_name(self.q_proj(x), "query")  # [batch, seq, heads, head_dim]
        k = checkpoint_name(self.k_proj(x), "key")
        v = checkpoint_name(self.v_proj(x), "value")
        return self.o_proj(self.attend(q, k, v, positions, segment_ids=segment_ids))


@ops.saves_inputs
def gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


class GPT2MLP(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed = {"embed": c.hidden_size}
        mlp = {"mlp": c.intermediate_size or 4 * c.hidden_size}
        self.up = Linear(embed, mlp, init=normal(c.initializer_range), rngs=rngs)
        self.down = Linear(mlp, embed, init=residual_init(c), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        up = checkpoint_name(self.up(x), "mlp_up")
        return self.down(checkpoint_name(gelu(up), "mlp_hidden"))


class GPT2Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.attn_norm = LayerNorm(size, eps=eps, rngs=rngs)
        self.attn = GPT2Attention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(size, eps=eps, rngs=rngs)
        self.mlp = GPT2MLP(config, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        attended = self.attn(normed, segment_ids, positions)
        x = x + self.dropout(checkpoint_name(attended, "attn_out"))
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + self.dropout(self.mlp(normed))


class GPT2(language.Decoder):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        init = normal(c.initializer_range)
        self.embed = Embedding(c.vocab_size, c.hidden_size, init=init, rngs=rngs)
        self.positions = Embedding(
            c.max_position_embeddings, c.hidden_size, axis="pos", init=init, rngs=rngs
        )
        self.dropout = dropout(c.dropout, rngs)
        self.blocks = stacked(lambda rngs: GPT2Block(c, rngs=rngs), c.num_hidden_layers, rngs)
        self.norm = LayerNorm(c.hidden_size, eps=c.layer_norm_epsilon, rngs=rngs)
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
        read = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = self.dropout(self.embed(tokens) + self.positions(read))
        x = scan_blocks(self.blocks, x, segment_ids, positions, unroll=self.config.unroll)
        return self.norm(x)


def residual_init(config: Config) -> Initializer:
    """Output weights of branches, scaled by 1 / sqrt(2 L) since 2 L branches add up."""
    return normal(config.initializer_range / (2 * config.num_hidden_layers) ** 0.5)


def build(config: Config, rngs: nnx.Rngs) -> GPT2:
    return GPT2(config, rngs=rngs)


def loss(model: GPT2, batch: language.LanguageBatch) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of next-token cross-entropy; see `jaxspeed.models.language`."""
    return language.next_token_loss(model, batch)
