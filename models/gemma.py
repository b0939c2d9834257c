"""Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786): local and global layers, four norms a block.

Norms store their scale without 1, queries have a scale of their own, and embeddings are multiplied
by sqrt(hidden_size). Gemma 2 caps scores and logits; Gemma 3 normalizes queries and keys, and its
local layers have a rotation of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops

from . import language
from .cached_attention import CachedAttention
from .layers import Embedding, Linear, RMSNorm, check_heads, dropout, normal, scan_blocks, stacked


@dataclass(frozen=True)
class Config:
    """Gemma's sizes; the defaults are those of Gemma 2 2B."""

    hidden_size: int = 2304
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    intermediate_size: int = 9216
    vocab_size: int = 256000
    max_position_embeddings: int = 8192  # trained context length; no array has this size
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: ops.Scaling | None = None  # of global layers; or a mapping of its fields
    rope_local_theta: float | None = None  # of local layers; None: as global ones
    query_pre_attn_scalar: float = 256.0  # scores are divided by its square root
    sliding_window: int = 4096  # of local layers
    global_layers: tuple[int, ...] | None = None  # None: every second one, from the second
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    qk_norm: bool = False
    initializer_range: float = 0.02
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    unroll: int | bool = 1  # of the scan over layers
    vocab_chunk: int | None = None  # columns of the head per chunk in the loss; None: automatic

    def __post_init__(self) -> None:
        width = self.head_dim * self.num_attention_heads
        check_heads(width, self.num_attention_heads, self.num_key_value_heads)
        scaling: Any = self.rope_scaling
        if isinstance(scaling, Mapping):
            object.__setattr__(self, "rope_scaling", ops.rope_scaling(scaling))
        ops.frequencies(self.head_dim, self.rope_theta, self.rope_scaling)  # or an error
        if self.global_layers is not None:
            object.__setattr__(self, "global_layers", tuple(self.global_layers))

    @property
    def is_global(self) -> np.ndarray:
        """[layers], whether a layer sees all tokens before."""
        layers = np.arange(self.num_hidden_layers)
        chosen = layers[1::2] if self.global_layers is None else self.global_layers
        return np.isin(layers, np.asarray(chosen, int))


_SMALL = Config(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    max_position_embeddings=128,
    query_pre_attn_scalar=16.0,
    sliding_window=16,
)

PRESETS: dict[str, Config] = {
    "tiny": _SMALL,
    "tiny3": replace(
        _SMALL,
        qk_norm=True,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_theta=1e6,
        rope_local_theta=1e4,
        global_layers=(2,),
    ),
    "gemma2-2b": Config(),
    "gemma2-9b": Config(
        hidden_size=3584,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=14336,
    ),
}


class GemmaAttention(CachedAttention):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed = {"embed": c.hidden_size}
        heads = {"heads": c.num_attention_heads, "head_dim": c.head_dim}
        kv_heads = {"kv_heads": c.num_key_value_heads, "head_dim": c.head_dim}
        init = normal(c.initializer_range)
        self.q_proj = Linear(embed, heads, init=init, bias=False, rngs=rngs)
        self.k_proj = Linear(embed, kv_heads, init=init, bias=False, rngs=rngs)
        self.v_proj = Linear(embed, kv_heads, init=init, bias=False, rngs=rngs)
        self.o_proj = Linear(heads, embed, init=init, bias=False, rngs=rngs)
        self.q_norm = norm(c, c.head_dim, rngs, "head_dim") if c.qk_norm else None
        self.k_norm = norm(c, c.head_dim, rngs, "head_dim") if c.qk_norm else None
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        rotations: tuple[ops.Rotation, ops.Rotation],
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        is_global: jax.Array,
    ) -> jax.Array:
        q, k = self.q_proj(x), self.k_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        local, everywhere = rotations
        rotation = local
        if everywhere is not local:
            rotation = jax.tree.map(lambda a, b: jnp.where(is_global, b, a), local, everywhere)
        q = checkpoint_name(ops.rotate(q, rotation), "query")
        k = checkpoint_name(ops.rotate(k, rotation), "key")
        v = checkpoint_name(self.v_proj(x), "value")  # [batch, seq, kv_heads, head_dim]
        return self.o_proj(self.attend_in_layer(q, k, v, segment_ids, positions, is_global))

    def attend_in_layer(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        is_global: jax.Array,
    ) -> jax.Array:
        """Attention with the layer's window: kernels know it when they are traced."""
        c = self.config
        form = {"scale": c.query_pre_attn_scalar**-0.5, "soft_cap": c.attn_logit_softcapping}
        if self.cached_key is not None:
            reach = jnp.where(is_global, jnp.iinfo(jnp.int32).max, c.sliding_window)
            cached = self.attend_cached(q, k, v, positions, reach, **form)
            if cached is not None:
                return cached

        def attention(window: int | None):
            return lambda q, k, v: ops.attention(
                q, k, v, window=window, segment_ids=segment_ids, **form
            )

        kinds = set(c.is_global.tolist())
        if q.shape[1] <= c.sliding_window or kinds == {True}:
            return attention(None)(q, k, v)
        if kinds == {False}:
            return attention(c.sliding_window)(q, k, v)
        return lax.cond(is_global, attention(None), attention(c.sliding_window), q, k, v)


@ops.saves_inputs
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


class GemmaMLP(nnx.Module):
    """down(gelu(gate(x)) * up(x)), with gelu in its tanh form."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed, mlp = {"embed": c.hidden_size}, {"mlp": c.intermediate_size}
        init = normal(c.initializer_range)
        self.gate = Linear(embed, mlp, init=init, bias=False, rngs=rngs)
        self.up = Linear(embed, mlp, init=init, bias=False, rngs=rngs)
        self.down = Linear(mlp, embed, init=init, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = checkpoint_name(self.gate(x), "mlp_gate"), checkpoint_name(self.up(x), "mlp_up")
        return self.down(checkpoint_name(geglu(gate, up), "mlp_hidden"))


class GemmaBlock(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.attn_norm = norm(config, size, rngs)
        self.attn = GemmaAttention(config, rngs=rngs)
        self.attn_out_norm = norm(config, size, rngs)
        self.mlp_norm = norm(config, size, rngs)
        self.mlp = GemmaMLP(config, rngs=rngs)
        self.mlp_out_norm = norm(config, size, rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        rotations: tuple[ops.Rotation, ops.Rotation],
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        is_global: jax.Array,
    ) -> jax.Array:
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        out = checkpoint_name(
            self.attn(normed, rotations, segment_ids, positions, is_global), "attn_out"
        )
        x = x + self.dropout(self.attn_out_norm(out))
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        return x + self.dropout(self.mlp_out_norm(self.mlp(normed)))


class Gemma(language.Decoder):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.config = config
        init = normal(c.initializer_range)
        self.embed = Embedding(c.vocab_size, c.hidden_size, init=init, rngs=rngs)
        self.blocks = stacked(lambda rngs: GemmaBlock(c, rngs=rngs), c.num_hidden_layers, rngs)
        self.norm = norm(c, c.hidden_size, rngs)
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
        freqs = ops.frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        everywhere = local = ops.rotation(read, freqs, c.rope_scaling)
        if c.rope_local_theta is not None:
            local = ops.rotation(read, ops.frequencies(c.head_dim, c.rope_local_theta))
        x = self.embed(tokens)
        x = x * jnp.asarray(c.hidden_size**0.5, x.dtype)  # rounded, as in training
        is_global = jnp.asarray(c.is_global)
        x = scan_blocks(
            self.blocks,
            x,
            (local, everywhere),
            segment_ids,
            positions,
            each=(is_global,),
            unroll=c.unroll,
        )
        return self.norm(x)


def norm(config: Config, size: int, rngs: nnx.Rngs, dim: str = "embed") -> RMSNorm:
    return RMSNorm(size, eps=config.rms_norm_eps, dim=dim, offset=1.0, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> Gemma:
    return Gemma(config, rngs=rngs)


def loss(model: Gemma, batch: language.LanguageBatch) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of next-token cross-entropy; see `jaxspeed.models.language`."""
    return language.next_token_loss(model, batch)
