"""Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786): local and global layers, four norms a block.

Norms store their scale without 1, queries have a scale of their own, and embeddings are multiplied
by sqrt(hidden_size). Gemma 2 caps scores and logits; Gemma 3 normalizes queries and keys, and its
local layers have a rotation of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from flax import nnx

from jaxspeed import ops

from . import language
from .blocks import Attention, GatedFeedForward, NormBoth, geglu, of_kinds
from .decoder import TINY, DecoderSizes, Rotary, RotaryDecoder
from .layers import RMSNorm, dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """Gemma's sizes; the defaults are those of Gemma 2 2B."""

    hidden_size: int = 2304
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    intermediate_size: int = 9216
    vocab_size: int = 256000
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
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_layers is not None:
            object.__setattr__(self, "global_layers", tuple(self.global_layers))

    @property
    def is_global(self) -> np.ndarray:
        """[layers], whether a layer sees all tokens before."""
        layers = np.arange(self.num_hidden_layers)
        chosen = layers[1::2] if self.global_layers is None else self.global_layers
        return np.isin(layers, np.asarray(chosen, int))


_SMALL = Config(
    **{**TINY, "num_hidden_layers": 3}, head_dim=16, query_pre_attn_scalar=16.0, sliding_window=16
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


def block(config: Config, rngs: nnx.Rngs) -> NormBoth:
    c = config

    def head_norm(dims: dict[str, int]) -> RMSNorm:
        return norm(c, rngs, {"head_dim": dims["head_dim"]})

    return NormBoth(
        norm(c, rngs),
        Attention(
            c.projections(),
            qk_norm=head_norm if c.qk_norm else None,
            windows=of_kinds(c.is_global.tolist(), c.sliding_window, None),
            scale=c.query_pre_attn_scalar**-0.5,
            cap=c.attn_logit_softcapping,
            rngs=rngs,
        ),
        norm(c, rngs),
        norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, geglu, init=c.init, rngs=rngs),
        norm(c, rngs),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs, dims: dict[str, int] | None = None) -> RMSNorm:
    dims = dims or {"embed": config.hidden_size}
    return RMSNorm(dims, eps=config.rms_norm_eps, offset=1.0, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    c = config
    local = [] if c.rope_local_theta is None else [Rotary(c.head_dim, c.rope_local_theta)]
    return RotaryDecoder(
        c,
        block,
        norm,
        rotaries=(*local, c.rotary),
        second=c.is_global.tolist(),
        embed_scale=c.hidden_size**0.5,
        rngs=rngs,
    )


loss = language.next_token_loss
objective = language.objective
