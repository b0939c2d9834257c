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

from . import language
from .blocks import ACTIVATIONS, Attention, FeedForward, NormBefore, Projections
from .layers import (
    Embedding,
    LayerNorm,
    check_heads,
    dropout,
    normal,
    scan_blocks,
    stacked,
)


@dataclass(frozen=True)
class Config(language.DecoderHead):
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
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True  # by 1 / sqrt(head_dim)
    scale_attn_by_inverse_layer_idx: bool = False  # the first layer's is 1
    reorder_and_upcast_attn: bool = False  # scores in fp32, as they always are here
    unroll: int | bool = 1  # of the scan over layers
    vocab_chunk: int | None = None  # columns of the head per chunk in the loss; None: automatic

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_attention_heads, self.num_key_value_heads)
        if self.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"activation_function is {self.activation_function!r}; known are {known}"
            )

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


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    init, out_init = normal(c.initializer_range), residual_init(c)
    heads = c.num_attention_heads
    kv_heads = c.num_key_value_heads or heads
    mlp = c.intermediate_size or 4 * c.hidden_size
    projections = Projections(
        c.hidden_size, heads, kv_heads, c.head_dim, init, out_init, bias=True, out_bias=True
    )
    return NormBefore(
        norm(c, rngs),
        Attention(projections, scale=None if c.scale_attn_weights else 1.0, rngs=rngs),
        norm(c, rngs),
        FeedForward(
            c.hidden_size,
            mlp,
            ACTIVATIONS[c.activation_function],
            init=init,
            out_init=out_init,
            rngs=rngs,
        ),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.layer_norm_epsilon, rngs=rngs)


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
        self.blocks = stacked(lambda rngs: block(c, rngs), c.num_hidden_layers, rngs)
        self.norm = norm(c, rngs)
        self.add_head(init, rngs)

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
        each: tuple[jax.Array, ...] = ()
        if self.config.scale_attn_by_inverse_layer_idx:
            layers = jnp.arange(self.config.num_hidden_layers)
            each = jnp.zeros_like(layers, bool), 1 / (1 + layers)
        context, unroll = ((), segment_ids, positions), self.config.unroll
        return self.norm(scan_blocks(self.blocks, x, *context, each=each, unroll=unroll))


def residual_init(config: Config) -> Initializer:
    """Output weights of branches, scaled by 1 / sqrt(2 L) since 2 L branches add up."""
    return normal(config.initializer_range / (2 * config.num_hidden_layers) ** 0.5)


def build(config: Config, rngs: nnx.Rngs) -> GPT2:
    return GPT2(config, rngs=rngs)


loss = language.next_token_loss
objective = language.objective
