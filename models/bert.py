"""BERT (arXiv:1810.04805): an encoder with a norm after each sum, for masked tokens or for labels.

A batch has `tokens` and may have `mask`, 1 where a token is no padding, and `token_types`, all
[batch, seq]; packed ones `segment_ids` and `positions`. `labels` are [batch, seq] without
`num_labels`: the tokens to be predicted, and -100 elsewhere. They are drawn in the loss, with the
tokens that replace them, if a batch has none and the config has a `mask_token_id`. Those of a
classifier are [batch] or real [batch, classes].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jaxspeed import ops

from .blocks import Attention, FeedForward, NormOfSum, Projections, exact_gelu
from .classification import label_loss
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
from .masking import CONTEXT, Masking, masked_batch, segments_of


@dataclass(frozen=True)
class Config(Masking):
    """BERT's sizes; the defaults are those of BERT base, uncased."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    vocab_size: int = 30522
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    dropout: float = 0.0
    num_labels: int | None = None  # of a classifier; None: a masked language model
    unroll: int | bool = 1  # of the scan over layers

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.hidden_size, self.num_attention_heads)

    @property
    def init(self) -> Initializer:
        return normal(self.initializer_range)


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
PRESETS: dict[str, Config] = {
    "tiny": Config(**_TINY),
    "tiny-classifier": Config(**_TINY, num_labels=3),
    "bert-base": Config(),
    "bert-large": Config(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormOfSum:
    c, heads = config, config.num_attention_heads
    sizes = Projections(
        c.hidden_size, heads, heads, c.hidden_size // heads, c.init, bias=True, out_bias=True
    )
    return NormOfSum(
        Attention(sizes, causal=False, rngs=rngs),
        norm(c, rngs),
        FeedForward(c.hidden_size, c.intermediate_size, exact_gelu, init=c.init, rngs=rngs),
        norm(c, rngs),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.layer_norm_eps, rngs=rngs)


class Bert(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, embed = config, {"embed": config.hidden_size}
        self.config = config

        def table(rows: int, axis: str) -> Embedding:
            return Embedding(rows, c.hidden_size, axis=axis, init=c.init, rngs=rngs)

        self.embed = table(c.vocab_size, "vocab")
        self.positions = table(c.max_position_embeddings, "pos")
        self.types = table(c.type_vocab_size, "pos")
        self.embed_norm = norm(c, rngs)
        self.dropout = dropout(c.dropout, rngs)
        self.blocks = stacked(lambda rngs: block(c, rngs), c.num_hidden_layers, rngs)
        square = Linear(embed, embed, init=c.init, rngs=rngs)
        self.transform: Linear | None = square if c.num_labels is None else None
        self.pooler: Linear | None = None if c.num_labels is None else square
        if c.num_labels is None:
            self.head_norm = norm(c, rngs)
            self.head_bias = param(rngs, zeros, {"vocab": c.vocab_size})
        else:
            self.score = Linear(embed, {"classes": c.num_labels}, init=c.init, rngs=rngs)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The last block's output, [batch, seq, embed]."""
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        read = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = self.embed(tokens) + self.types(types) + self.positions(read)
        segments = segments_of(mask, segment_ids)
        x = self.dropout(self.embed_norm(x))
        return scan_blocks(self.blocks, x, (), segments, unroll=self.config.unroll)

    def __call__(self, tokens: jax.Array, **context: jax.Array | None) -> jax.Array:
        """Logits in fp32, [batch, seq, vocab] or [batch, classes]; `context` as in `hidden`."""
        x = self.hidden(tokens, **context)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        if self.pooler is not None:
            pooled = self.dropout(jnp.tanh(self.pooler(x[:, 0])))
            return self.score(pooled).astype(dtype)
        assert self.transform is not None
        x = self.head_norm(exact_gelu(self.transform(x)))
        head = self.embed.table[...]
        logits = jnp.einsum("bse,ve->bsv", x, head, preferred_element_type=dtype)
        return logits + self.head_bias[...]


def build(config: Config, rngs: nnx.Rngs) -> Bert:
    return Bert(config, rngs=rngs)


def objective(config: Any) -> str:
    return "masked" if config.num_labels is None else "classification"


def loss(
    model: Any,
    batch: Mapping[str, jax.Array],
    train: bool | None = None,
    rng: jax.Array | None = None,
) -> Any:
    """(sum, weight) of the cross-entropy of masked tokens, or the loss of a classifier's labels."""
    config = model.config
    context = {name: batch[name] for name in CONTEXT if name in batch}
    if config.num_labels is not None:
        return label_loss(model(batch["tokens"], **context), batch["labels"], train)
    tokens, labels = masked_batch(config, config.vocab_size, batch, rng)
    return ops.cross_entropy(model(tokens, **context), labels)
