"""Falcon (arXiv:2311.16867): branches side by side, few key heads, LayerNorm.

Falcon 7B has one norm and one key head, Falcon 40B and 180B have two norms and several. Falcon-RW
(arXiv:2306.01116) has one branch after the other, and ALiBi in place of a rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import language
from .blocks import Attention, FeedForward, NormBefore, ParallelBranches, WithImages, exact_gelu
from .decoder import TINY, DecoderSizes, RotaryDecoder
from .layers import LayerNorm, dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """Falcon's sizes; the defaults are those of Falcon 7B."""

    hidden_size: int = 4544
    num_attention_heads: int = 71
    num_key_value_heads: int = 1
    intermediate_size: int = 18176
    vocab_size: int = 65024
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5  # of LayerNorm
    rope_theta: float = 10000.0
    new_decoder_architecture: bool = False  # in files each key head follows its query heads
    parallel_attn: bool = True
    num_norms: int = 1  # of parallel branches
    alibi: bool = False
    bias: bool = False
    tie_word_embeddings: bool = True


_RW: dict[str, Any] = {"parallel_attn": False, "alibi": True, "bias": True}

PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY, new_decoder_architecture=True, num_norms=2),
    "tiny-7b": Config(**{**TINY, "num_key_value_heads": 1}),
    "tiny-rw": Config(**{**TINY, "num_key_value_heads": 4}, **_RW),
    "falcon-7b": Config(),
    "falcon-40b": Config(
        hidden_size=8192,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=32768,
        new_decoder_architecture=True,
        num_norms=2,
    ),
    "falcon-rw-1b": replace(
        Config(**_RW),
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        vocab_size=50304,
    ),
}


class BiasedAttention(Attention):
    """Attention with linear biases (ALiBi, arXiv:2108.12409), which grow with a key's position.

    A bias is one more dim of a key, which its query has as 1. Where several query heads read a key
    head, whose biases differ, each has a dim of its own.
    """

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        super().init_cache(rows, length, dtype)
        assert self.key_cache is not None
        keys = self.key_cache.get_value()
        *stack, _, kv_heads, _ = self.k_proj.kernel.shape
        group = self.q_proj.kernel.shape[len(stack) + 1] // kv_heads
        self.key_cache = nnx.Cache(jnp.zeros((*keys.shape[:-1], keys.shape[-1] + group), dtype))

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | WithImages | None,
        positions: jax.Array | None,
        second: jax.Array | bool,
    ) -> jax.Array:
        heads, kv_heads = q.shape[2], k.shape[2]
        read = jnp.arange(k.shape[1])[None] if positions is None else positions
        # In bf16, as published models were trained.
        biases = jnp.asarray(slopes(heads), jnp.bfloat16) * read[..., None].astype(jnp.bfloat16)
        own = jnp.tile(jnp.eye(heads // kv_heads, dtype=q.dtype), (kv_heads, 1))
        shape = (*k.shape[:3], heads // kv_heads)
        biases = jnp.broadcast_to(biases.reshape(-1, *shape[1:]), shape).astype(k.dtype)
        own = jnp.broadcast_to(own, (*q.shape[:3], own.shape[-1]))
        q, k = jnp.concatenate([q, own], axis=-1), jnp.concatenate([k, biases], axis=-1)
        return super().attend(q, k, v, segment_ids, positions, second)


def slopes(heads: int) -> np.ndarray:
    """[heads]: a geometric sequence to 2^-8; beyond a power of two heads, between its terms."""
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * (heads - power) + 1, 2))
    return np.concatenate([first, between])


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    attention = BiasedAttention if c.alibi else Attention
    one_norm = c.parallel_attn and c.num_norms == 1
    return (ParallelBranches if c.parallel_attn else NormBefore)(
        norm(c, rngs),
        attention(
            c.projections(bias=c.bias, out_bias=c.bias), scale=c.size_of_head**-0.5, rngs=rngs
        ),
        None if one_norm else norm(c, rngs),
        FeedForward(
            c.hidden_size, c.intermediate_size, exact_gelu, init=c.init, bias=c.bias, rngs=rngs
        ),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm({"embed": config.hidden_size}, eps=config.rms_norm_eps, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    rotaries = () if config.alibi else (config.rotary,)
    return RotaryDecoder(config, block, norm, rotaries=rotaries, rngs=rngs)


loss = language.next_token_loss
objective = language.objective
