"""ModernBERT (arXiv:2412.13663): BERT with rotary positions, gated feed-forwards and local layers.

Norms come before attention and feed-forward, except before the first attention, and linear layers
have no bias. Every third layer is global; in the others a token sees 64 tokens on either side.
Batches and labels are those of BERT, without `token_types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jaxspeed import ops

from . import bert
from .blocks import ACTIVATIONS, Attention, GatedFeedForward, NormBefore, Projections, of_kinds
from .decoder import Rotary
from .layers import (
    Embedding,
    LayerNorm,
    Linear,
    check_heads,
    dropout,
    normal,
    param,
    scan_blocks,
    stacked,
    zeros,
)
from .masking import Masking, segments_of


@dataclass(frozen=True)
class Config(Masking):
    """ModernBERT's sizes; the defaults are those of ModernBERT base."""

    hidden_size: int = 768
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    intermediate_size: int = 1152
    vocab_size: int = 50368
    max_position_embeddings: int = 8192  # trained context length; no array has this size
    rope_theta: float = 160000.0  # of global layers
    rope_local_theta: float = 10000.0
    local_attention: int = 128  # tokens that a local layer sees, half of them on either side
    global_layers: tuple[int, ...] | None = None  # None: every third one, from the first
    layer_norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False  # of the layer before the head's norm
    decoder_bias: bool = True
    activation: str = "gelu"
    mean_pooling: bool = False  # of a classifier; otherwise the first token
    initializer_range: float = 0.02
    dropout: float = 0.0
    num_labels: int | None = None  # of a classifier; None: a masked language model
    unroll: int | bool = 1  # of the scan over layers

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.hidden_size, self.num_attention_heads)
        if self.global_layers is not None:
            object.__setattr__(self, "global_layers", tuple(self.global_layers))
        if self.num_hidden_layers < 2:
            raise ValueError("num_hidden_layers is 1: the first layer has no norm, others have one")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is none of {list(ACTIVATIONS)}")

    @property
    def is_global(self) -> list[bool]:
        """[layers], whether a layer sees all tokens."""
        layers = range(self.num_hidden_layers)
        chosen = layers[::3] if self.global_layers is None else self.global_layers
        return [layer in chosen for layer in layers]

    @property
    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Of local and of global layers."""
        dims = self.hidden_size // self.num_attention_heads
        return Rotary(dims, self.rope_local_theta), Rotary(dims, self.rope_theta)

    @property
    def init(self) -> Initializer:
        return normal(self.initializer_range)


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "local_attention": 16,
}
PRESETS: dict[str, Config] = {
    "tiny": Config(**_TINY),
    "tiny-classifier": Config(**_TINY, num_labels=3),
    "modernbert-base": Config(),
    "modernbert-large": Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624
    ),
}


def block(config: Config, layers: slice, rngs: nnx.Rngs) -> NormBefore:
    """A block of these layers; the first one has no norm before attention."""
    c, heads = config, config.num_attention_heads
    sizes = Projections(
        c.hidden_size,
        heads,
        heads,
        c.hidden_size // heads,
        c.init,
        bias=c.attention_bias,
        out_bias=c.attention_bias,
    )
    windows = of_kinds(c.is_global[layers], c.local_attention // 2 + 1, None)
    activation = ACTIVATIONS[c.activation]

    @ops.saves_inputs
    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up

    return NormBefore(
        norm(c, rngs) if layers.start else _unchanged,
        Attention(sizes, causal=False, windows=windows, rngs=rngs),
        norm(c, rngs),
        GatedFeedForward(
            c.hidden_size, c.intermediate_size, gated, init=c.init, bias=c.mlp_bias, rngs=rngs
        ),
        dropout(c.dropout, rngs),
    )


def _unchanged(x: jax.Array) -> jax.Array:
    return x


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    size = {"embed": config.hidden_size}
    return LayerNorm(size, eps=config.layer_norm_eps, bias=config.norm_bias, rngs=rngs)


class ModernBert(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, embed = config, {"embed": config.hidden_size}
        self.config = config
        self.embed = Embedding(c.vocab_size, c.hidden_size, init=c.init, rngs=rngs)
        self.embed_norm = norm(c, rngs)
        self.dropout = dropout(c.dropout, rngs)
        self.first = block(c, slice(0, 1), rngs)
        self.blocks = stacked(
            lambda rngs: block(c, slice(1, None), rngs), c.num_hidden_layers - 1, rngs
        )
        self.norm = norm(c, rngs)
        self.transform = Linear(embed, embed, init=c.init, bias=c.head_bias, rngs=rngs)
        self.head_norm = norm(c, rngs)
        has_bias = c.num_labels is None and c.decoder_bias
        self.head_bias = param(rngs, zeros, {"vocab": c.vocab_size}) if has_bias else None
        self.score = (
            None
            if c.num_labels is None
            else Linear(embed, {"classes": c.num_labels}, init=c.init, rngs=rngs)
        )

    def hidden(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The last norm's output, [batch, seq, embed]."""
        segments = segments_of(mask, segment_ids)
        read = jnp.arange(tokens.shape[1]) if positions is None else positions
        rotations = [rotary.at(read) for rotary in self.config.rotaries]
        first, *rest = self.config.is_global
        x = self.dropout(self.embed_norm(self.embed(tokens)))
        x = self.first(x, [rotations[first]], segments)
        context = (rotations, segments, None)
        each = (jnp.asarray(rest),)
        return self.norm(
            scan_blocks(self.blocks, x, *context, each=each, unroll=self.config.unroll)
        )

    def __call__(
        self, tokens: jax.Array, *, mask: jax.Array | None = None, **context: jax.Array | None
    ) -> jax.Array:
        """Logits in fp32, [batch, seq, vocab] or [batch, classes]; `context` as in `hidden`."""
        x = self.hidden(tokens, mask=mask, **context)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        activation = ACTIVATIONS[self.config.activation]
        if self.score is not None:
            counts = jnp.ones_like(tokens) if mask is None else mask != 0
            x = _mean(x, counts.astype(dtype)) if self.config.mean_pooling else x[:, 0]
        x = self.head_norm(activation(self.transform(x)))
        if self.score is not None:
            return self.score(self.dropout(x)).astype(dtype)
        head = self.embed.table[...]
        logits = jnp.einsum("bse,ve->bsv", x, head, preferred_element_type=dtype)
        return logits if self.head_bias is None else logits + self.head_bias[...]


def _mean(x: jax.Array, counts: jax.Array) -> jax.Array:
    """[batch, embed], over the tokens that count."""
    total = jnp.sum(x.astype(counts.dtype) * counts[..., None], axis=1)
    return (total / jnp.sum(counts, axis=1, keepdims=True)).astype(x.dtype)


def build(config: Config, rngs: nnx.Rngs) -> ModernBert:
    return ModernBert(config, rngs=rngs)


loss = bert.loss
objective = bert.objective
