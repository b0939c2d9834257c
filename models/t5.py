"""T5 (arXiv:1910.10683) and T5 1.1: an encoder, and a decoder that attends to its output.

Positions are biases of the scores, learned for each head and range of distances, and shared by the
layers of a stack. Scores have no scale, norms no bias and no mean.

A batch of pairs has `inputs` [batch, in_seq] and `targets` [batch, out_seq], -100 where they do not
count, and may have a `mask` [batch, in_seq], 1 where an input is no padding. From a batch of
`tokens` [batch, seq] alone the loss draws both: spans are replaced by sentinels, and predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops

from . import language
from .blocks import ACTIVATIONS, FeedForward, GatedFeedForward, NormBefore
from .cached_attention import CachedAttention
from .layers import (
    Embedding,
    Linear,
    RMSNorm,
    dropout,
    normal,
    param,
    scan_blocks,
    stacked,
)
from .masking import Spans, segments_of


@dataclass(frozen=True)
class Config(Spans):
    """T5's sizes; the defaults are those of T5 small."""

    hidden_size: int = 512
    head_dim: int = 64
    intermediate_size: int = 2048
    num_hidden_layers: int = 6  # of the encoder
    num_decoder_layers: int | None = None  # None: as many
    num_attention_heads: int = 8
    vocab_size: int = 32128
    num_buckets: int = 32  # of distances
    max_distance: int = 128  # all beyond it have the same bias
    activation: str = "relu"
    gated: bool = False
    rms_norm_eps: float = 1e-6
    initializer_factor: float = 1.0
    dropout: float = 0.0
    tie_word_embeddings: bool = True  # a tied head's input is divided by sqrt(hidden_size)
    decoder_start_token_id: int = 0
    unroll: int | bool = 1  # of the scan over layers
    vocab_chunk: int | None = None  # columns of the head per chunk in the loss; None: automatic

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is none of {list(ACTIVATIONS)}")
        if self.num_buckets < 4 or self.num_buckets % 4 or self.max_distance < self.num_buckets:
            raise ValueError(
                f"num_buckets {self.num_buckets} is no multiple of 4, or over max_distance "
                f"{self.max_distance}"
            )

    @property
    def decoder_layers(self) -> int:
        return self.num_decoder_layers or self.num_hidden_layers

    def init(self, variance: float) -> Initializer:
        return normal(self.initializer_factor * variance**0.5)


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
_V11: dict[str, Any] = {"activation": "gelu_new", "gated": True, "tie_word_embeddings": False}
_BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
PRESETS: dict[str, Config] = {
    "tiny": Config(**_TINY),
    "tiny-v1.1": Config(**_TINY, **_V11),
    "t5-small": Config(),
    "t5-base": Config(**_BASE, intermediate_size=3072),
    "t5-large": Config(**_LARGE, intermediate_size=4096),
    "t5-v1.1-base": Config(**_BASE, **_V11),
    "t5-v1.1-large": Config(**_LARGE, **_V11, intermediate_size=2816),
}


class DistanceBias(nnx.Module):
    """Biases of scores by the distance between query and key: the attention of all layers adds it.

    Args:
      both_sides: whether keys after the query have buckets of their own.
    """

    def __init__(self, config: Config, *, both_sides: bool, rngs: nnx.Rngs):
        c = config
        heads = {"heads": c.num_attention_heads}
        self.table = param(rngs, c.init(1 / c.hidden_size), {"pos": c.num_buckets} | heads)
        self.both_sides, self.farthest = both_sides, c.max_distance

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """[heads, seq, kv_seq], or with a first dim of the batch as positions [..., seq] have."""
        distance = keys - queries[..., None]
        table = self.table[...]
        side = len(table) // (2 if self.both_sides else 1)
        by_distance = jnp.asarray(buckets(side, self.farthest))
        before = jnp.minimum(jnp.abs(distance), self.farthest)
        if not self.both_sides:
            before = jnp.where(distance > 0, 0, before)
        number = by_distance[before]
        if self.both_sides:
            number = number + jnp.where(distance > 0, side, 0)
        return jnp.moveaxis(ops.embed(table, number), -1, -3)


def buckets(count: int, farthest: int) -> np.ndarray:
    """[farthest + 1]: the bucket of each distance; half of them have one distance each.

    The others' bounds grow geometrically up to `farthest`.
    """
    alone = count // 2
    distances = np.arange(farthest + 1)
    ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(alone)
    beyond = np.log(ratio) / np.float32(math.log(farthest / alone)) * np.float32(count - alone)
    far = np.minimum(alone + beyond.astype(np.int32), count - 1)
    return np.where(distances < alone, distances, far).astype(np.int32)


class Attention(CachedAttention):
    """Attention of a layer to itself, or to another sequence."""

    def __init__(self, config: Config, *, causal: bool = False, rngs: nnx.Rngs):
        c = config
        embed = {"embed": c.hidden_size}
        heads = {"heads": c.num_attention_heads, "head_dim": c.head_dim}
        kv_heads = {"kv_heads": c.num_attention_heads, "head_dim": c.head_dim}

        def linear(inputs: dict[str, int], outputs: dict[str, int], variance: float) -> Linear:
            return Linear(inputs, outputs, init=c.init(variance), bias=False, rngs=rngs)

        self.q_proj = linear(embed, heads, 1 / (c.hidden_size * c.head_dim))
        self.k_proj = linear(embed, kv_heads, 1 / c.hidden_size)
        self.v_proj = linear(embed, kv_heads, 1 / c.hidden_size)
        self.o_proj = linear(heads, embed, 1 / (c.num_attention_heads * c.head_dim))
        self.causal = causal

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        q = checkpoint_name(self.q_proj(x), "query")
        k, v = self.keys(x)
        out = self.attend_cached(q, k, v, positions, scale=1.0, bias=bias)
        if out is None:
            ids = segment_ids
            out = ops.attention(q, k, v, causal=self.causal, segment_ids=ids, scale=1.0, bias=bias)
        return self.o_proj(out)

    def keys(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values, [batch, seq, kv_heads, head_dim]."""
        return checkpoint_name(self.k_proj(x), "key"), checkpoint_name(self.v_proj(x), "value")

    def across(
        self, x: jax.Array, source: jax.Array | None, kv_segment_ids: jax.Array | None
    ) -> jax.Array:
        """Attention to `source` [batch, kv_seq, embed] or, without it, to the keys of a cache."""
        q = checkpoint_name(self.q_proj(x), "query")
        k, v = self.stored() if source is None else self.stored(*self.keys(source))
        ids = None if kv_segment_ids is None else jnp.ones(x.shape[:2], kv_segment_ids.dtype)
        out = ops.attention(
            q, k, v, causal=False, segment_ids=ids, kv_segment_ids=kv_segment_ids, scale=1.0
        )
        return self.o_proj(out)


def encoder_block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    attention = Attention(c, rngs=rngs)
    return NormBefore(
        norm(c, rngs), attention, norm(c, rngs), feed_forward(c, rngs), dropout(c.dropout, rngs)
    )


class DecoderBlock(nnx.Module):
    """x + attn(norm(x)), then x + cross(norm(x), source), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.attn_norm = norm(c, rngs)
        self.attn = Attention(c, causal=True, rngs=rngs)
        self.cross_norm = norm(c, rngs)
        self.cross = Attention(c, rngs=rngs)
        self.mlp_norm = norm(c, rngs)
        self.mlp = feed_forward(c, rngs)
        self.dropout = dropout(c.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        positions: jax.Array | None,
        source: jax.Array | None,
        kv_segment_ids: jax.Array | None,
    ) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        out = self.attn(normed, bias, None, positions)
        x = x + self.dropout(checkpoint_name(out, "attn_out"))
        out = self.cross.across(self.cross_norm(x), source, kv_segment_ids)
        x = x + self.dropout(checkpoint_name(out, "attn_out"))
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + self.dropout(self.mlp(normed))


def norm(config: Config, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm({"embed": config.hidden_size}, eps=config.rms_norm_eps, rngs=rngs)


def feed_forward(config: Config, rngs: nnx.Rngs) -> FeedForward | GatedFeedForward:
    c, activation = config, ACTIVATIONS[config.activation]
    sizes = c.hidden_size, c.intermediate_size
    init, out = c.init(1 / c.hidden_size), c.init(1 / c.intermediate_size)
    if not c.gated:
        return FeedForward(*sizes, activation, init=init, out_init=out, bias=False, rngs=rngs)

    @ops.saves_inputs
    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up

    return GatedFeedForward(*sizes, gated, init=init, out_init=out, rngs=rngs)


class T5(language.Decoder):
    """Encoder and decoder. A cache has keys and values of the decoder's tokens, and the inputs'."""

    cached_mask: nnx.Cache[jax.Array] | None = None  # [rows, length], of the inputs

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.config = config

        def table() -> Embedding:
            return Embedding(c.vocab_size, c.hidden_size, init=c.init(1.0), rngs=rngs)

        self.embed = table()
        self.dropout = dropout(c.dropout, rngs)
        self.encoder_bias = DistanceBias(c, both_sides=True, rngs=rngs)
        self.encoder = stacked(lambda rngs: encoder_block(c, rngs), c.num_hidden_layers, rngs)
        self.encoder_norm = norm(c, rngs)
        self.decoder_bias = DistanceBias(c, both_sides=False, rngs=rngs)
        self.decoder = stacked(lambda rngs: DecoderBlock(c, rngs=rngs), c.decoder_layers, rngs)
        self.decoder_norm = norm(c, rngs)
        self.head = None if c.tie_word_embeddings else table()

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        self.decoder.attn.init_cache(rows, length, dtype)
        self.decoder.cross.init_cache(rows, length, dtype)
        self.cached_mask = nnx.Cache(jnp.zeros((rows, length), jnp.int32))

    def encode(self, inputs: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """inputs [batch, in_seq] to what the decoder attends to, [batch, in_seq, embed]."""
        places = jnp.arange(inputs.shape[1])
        context = self.encoder_bias(places, places), segments_of(mask, None)
        x = self.dropout(self.embed(inputs))
        x = scan_blocks(self.encoder, x, *context, unroll=self.config.unroll)
        return self.dropout(self.encoder_norm(x))

    def hidden(
        self,
        tokens: jax.Array,
        *,
        inputs: jax.Array | None = None,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's tokens [batch, seq] to the head's input; `inputs` as in `encode`.

        Without inputs, those of the cache.
        """
        if inputs is None and self.cached_mask is None:
            raise ValueError(
                "T5 is called with the inputs of its encoder: model(tokens, inputs=...)"
            )
        source = None if inputs is None else self.encode(inputs, mask)
        queries = keys = jnp.arange(tokens.shape[1])
        if self.cached_mask is not None:
            if tokens.shape[1] == 1 and positions is not None:
                queries, keys = positions, jnp.arange(self.cached_mask.shape[1])
            if inputs is not None:
                empty = self.cached_mask.get_value()
                counts = 1 if mask is None else mask.astype(empty.dtype)
                self.cached_mask.set_value(empty.at[:, : inputs.shape[1]].set(counts))
            else:
                mask = self.cached_mask.get_value()
        bias = self.decoder_bias(queries, keys)
        ids = None if mask is None else (mask != 0).astype(jnp.int32)
        x = self.dropout(self.embed(tokens))
        context = bias, positions, source, ids
        x = scan_blocks(self.decoder, x, *context, unroll=self.config.unroll)
        x = self.dropout(self.decoder_norm(x))
        if self.head is None:
            x = x * jnp.asarray(self.config.hidden_size**-0.5, x.dtype)
        return x

    def __call__(  # type: ignore[override]
        self,
        tokens: jax.Array,
        *,
        inputs: jax.Array | None = None,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        at: jax.Array | None = None,
    ) -> jax.Array:
        """Logits [batch, seq, vocab] of the decoder's tokens; see `hidden` and `Decoder`."""
        hidden = self.hidden(tokens, positions=positions, inputs=inputs, mask=mask)
        return language.logits(self, hidden, at)


def build(config: Config, rngs: nnx.Rngs) -> T5:
    return T5(config, rngs=rngs)


def objective(config: Config) -> str:
    return "span_corruption"


def loss(model: T5, batch: Mapping[str, jax.Array], rng: jax.Array | None = None) -> Any:
    """(sum, weight) of the cross-entropy of the targets, which are drawn if a batch has none."""
    c = model.config
    inputs, targets, mask = c.pair(batch, rng)
    ids = jnp.where(targets == language.IGNORED, 0, targets)
    start = jnp.full_like(ids[:, :1], c.decoder_start_token_id)
    tokens = jnp.concatenate([start, ids[:, :-1]], axis=1)
    hidden = model.hidden(tokens, inputs=inputs, mask=mask)
    return language.cross_entropy(model, hidden, targets)
