"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, experts in groups.

Queries, and keys with values, are linear functions of vectors of a low rank, and a part of each
head is rotated; the keys' is shared by all heads. The first blocks are dense, and beside the
experts that a router chooses there are some that all tokens go through. V3 chooses by sigmoids with
biases that balance the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops

from . import mixture
from .blocks import GatedFeedForward, NormBefore, swiglu
from .cached_attention import CachedAttention
from .decoder import TINY, Rotary, rms_norm
from .layers import Linear, RMSNorm, dropout
from .mixture import Experts, MixtureBlock, MixtureDecoder, MixtureSizes

_RANK_EPS = 1e-6  # of the norms of low rank


@dataclass(frozen=True)
class Config(MixtureSizes):
    """DeepSeek's sizes; the defaults are those of DeepSeek-V3.

    `head_dim` is that of queries and keys, and there are as many key heads as query heads.
    """

    hidden_size: int = 7168
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    intermediate_size: int = 18432  # of the dense blocks
    vocab_size: int = 129280
    max_position_embeddings: int = 163840
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: ops.Scaling | None = None
    q_lora_rank: int | None = 1536  # None: queries have no low rank
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  # the dims of a head that are rotated
    v_head_dim: int = 128
    attention_bias: bool = False
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    num_shared_experts: int = 1
    num_dense_layers: int = 3
    sigmoid_scores: bool = True  # with biases; V2: softmax
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    num_groups: int = 8
    num_limited_groups: int = 4  # those of a token's experts
    router_aux_loss_coef: float = 0.0
    sequence_aux_loss_coef: float = 0.0001
    bias_update_rate: float = 0.001  # where scores are sigmoids

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        super().__post_init__()
        if not self.num_dense_layers < self.num_hidden_layers:
            raise ValueError(
                f"num_dense_layers {self.num_dense_layers} leaves none of {self.num_hidden_layers} "
                "layers with experts"
            )

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.qk_rope_head_dim, self.rope_theta, self.rope_scaling)

    @property
    def score_scale(self) -> float:
        """Of attention's scores; YaRN with an mscale_all_dim has its square as a factor."""
        scale, scaling = self.size_of_head**-0.5, self.rope_scaling
        if isinstance(scaling, ops.YarnScaling) and scaling.mscale_all_dim:
            scale *= scaling.growth(scaling.mscale_all_dim) ** 2
        return scale

    @property
    def routing(self) -> dict[str, Any]:
        return {
            **super().routing,
            "scores": "sigmoid" if self.sigmoid_scores else "softmax",
            "renormalize": self.norm_topk_prob,
            "groups": self.num_groups,
            "limited_groups": self.num_limited_groups,
            "group_score": "top2" if self.sigmoid_scores else "max",
            "scale": self.routed_scaling_factor,
        }


def _yarn(mscale: float) -> ops.YarnScaling:
    return ops.YarnScaling(40.0, 4096, mscale=mscale, mscale_all_dim=mscale)


_V3 = Config(rope_scaling=_yarn(1.0))
_V2 = replace(
    _V3,
    hidden_size=5120,
    num_hidden_layers=60,
    intermediate_size=12288,
    vocab_size=102400,
    rope_scaling=_yarn(0.707),
    num_experts=160,
    num_experts_per_tok=6,
    moe_intermediate_size=1536,
    num_shared_experts=2,
    num_dense_layers=1,
    sigmoid_scores=False,
    norm_topk_prob=False,
    routed_scaling_factor=16.0,
    num_limited_groups=3,
    router_aux_loss_coef=0.003,
    sequence_aux_loss_coef=0.0,
)

PRESETS: dict[str, Config] = {
    "tiny": Config(
        **{**TINY, "num_hidden_layers": 3},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        num_dense_layers=1,
        num_groups=4,
        num_limited_groups=2,
    ),
    "deepseek-v2-lite": replace(
        _V2,
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        intermediate_size=10944,
        q_lora_rank=None,
        num_experts=64,
        moe_intermediate_size=1408,
        routed_scaling_factor=1.0,
        num_groups=1,
        num_limited_groups=1,
        router_aux_loss_coef=0.0,
        sequence_aux_loss_coef=0.001,
    ),
    "deepseek-v2": _V2,
    "deepseek-v3": _V3,
}


class LatentAttention(CachedAttention):
    """Multi-head latent attention. A cache has the keys and values of all heads."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        embed, heads = {"embed": c.hidden_size}, c.num_attention_heads
        keys = {"heads": heads, "head_dim": c.size_of_head}
        values = {"heads": heads, "head_dim": c.v_head_dim}
        both = {"heads": heads, "head_dim": c.qk_nope_head_dim + c.v_head_dim}
        self.config = c

        def linear(inputs: dict[str, int], outputs: dict[str, int], bias: bool = False) -> Linear:
            return Linear(inputs, outputs, init=c.init, bias=bias, rngs=rngs)

        if c.q_lora_rank is None:
            self.q_down = self.q_norm = None
            self.q_up = linear(embed, keys)
        else:
            q_rank = {"q_rank": c.q_lora_rank}
            self.q_down = linear(embed, q_rank, c.attention_bias)
            self.q_norm = RMSNorm(q_rank, eps=_RANK_EPS, rngs=rngs)
            self.q_up = linear(q_rank, keys)
        kv_rank = {"kv_rank": c.kv_lora_rank}
        self.kv_down = linear(embed, kv_rank, c.attention_bias)
        self.kv_norm = RMSNorm(kv_rank, eps=_RANK_EPS, rngs=rngs)
        self.kv_up = linear(kv_rank, both)
        self.k_rotated = linear(embed, {"head_dim": c.qk_rope_head_dim}, c.attention_bias)
        self.o_proj = linear(values, embed, c.attention_bias)

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        *stack, _, heads, _ = self.kv_up.kernel.shape
        slots = (*stack, rows, heads, length)
        self.key_cache = nnx.Cache(jnp.zeros((*slots, self.config.size_of_head), dtype))
        self.value_cache = nnx.Cache(jnp.zeros((*slots, self.config.v_head_dim), dtype))

    def __call__(
        self,
        x: jax.Array,
        rotations: Sequence[ops.Rotation],
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        c, (by,) = self.config, rotations
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(checkpoint_name(self.q_down(x), "query_latent")))
        else:
            q = self.q_up(x)
        q, q_rotated = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        latent = checkpoint_name(self.kv_down(x), "key_value_latent")
        k_rotated = self.k_rotated(x)[:, :, None]  # of all heads
        k, v = jnp.split(self.kv_up(self.kv_norm(latent)), [c.qk_nope_head_dim], axis=-1)
        k_rotated = ops.rotate_neighbours(k_rotated, by)
        k_rotated = jnp.broadcast_to(k_rotated, (*k.shape[:-1], c.qk_rope_head_dim))
        q = jnp.concatenate([q, ops.rotate_neighbours(q_rotated, by)], axis=-1)
        q = checkpoint_name(q, "query")
        k = checkpoint_name(jnp.concatenate([k, k_rotated], axis=-1), "key")
        v = checkpoint_name(v, "value")
        out = self.attend_cached(q, k, v, positions, scale=c.score_scale)
        if out is None:
            out = ops.attention(q, k, v, segment_ids=segment_ids, scale=c.score_scale)
        return self.o_proj(out)


def block(config: Config, rngs: nnx.Rngs) -> MixtureBlock:
    c = config
    size = c.moe_intermediate_size
    experts = Experts(c, size, c.num_shared_experts * size, rngs=rngs)
    return MixtureBlock(*_attention(c, rngs), experts, dropout(c.dropout, rngs))


def dense_block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    mlp = GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs)
    return NormBefore(*_attention(c, rngs), mlp, dropout(c.dropout, rngs))


def _attention(config: Config, rngs: nnx.Rngs) -> tuple[RMSNorm, LatentAttention, RMSNorm]:
    """Attention between the two norms of a block."""
    c = config
    return rms_norm(c, rngs), LatentAttention(c, rngs=rngs), rms_norm(c, rngs)


def build(config: Config, rngs: nnx.Rngs) -> MixtureDecoder:
    c = config
    return MixtureDecoder(
        c,
        block,
        rms_norm,
        rotaries=(c.rotary,),
        dense_block=dense_block,
        dense_layers=c.num_dense_layers,
        bias_update_rate=c.bias_update_rate if c.sigmoid_scores else None,
        rngs=rngs,
    )


loss = mixture.loss
objective = mixture.objective
