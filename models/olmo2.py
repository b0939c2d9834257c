"""OLMo 2 (arXiv:2501.00656): norms after the branches, and over all queries and all keys.

OLMo 3 (arXiv:2512.13961) has windows; the rotation of its global layers alone may be scaled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from jaxspeed import ops

from . import language
from .blocks import Attention, GatedFeedForward, NormAfter, swiglu
from .decoder import TINY, Rotary, RotaryDecoder, WindowedSizes, rms_norm
from .layers import RMSNorm, dropout


@dataclass(frozen=True)
class Config(WindowedSizes):
    """OLMo 2's sizes; the defaults are those of OLMo 2 7B."""

    num_key_value_heads: int = 32
    intermediate_size: int = 11008
    vocab_size: int = 100352
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False


_7B = Config()

PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY),
    "tiny3": Config(**{**TINY, "num_hidden_layers": 4}, sliding_window=16, global_layers=(3,)),
    "olmo2-1b": replace(
        _7B,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
    ),
    "olmo2-7b": _7B,
    "olmo2-13b": replace(
        _7B,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        intermediate_size=13824,
    ),
    "olmo3-7b": replace(
        _7B,
        vocab_size=100278,
        max_position_embeddings=65536,
        rope_scaling=ops.YarnScaling(8.0, 8192, attention_factor=1.2079441541679836),
        sliding_window=4096,
        global_layers=tuple(range(3, 32, 4)),
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormAfter:
    c = config
    return NormAfter(
        Attention(
            c.projections(bias=c.attention_bias, out_bias=c.attention_bias),
            qk_norm=lambda dims: RMSNorm(dims, eps=c.rms_norm_eps, rngs=rngs),
            windows=c.windows,
            rngs=rngs,
        ),
        rms_norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs),
        rms_norm(c, rngs),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    c = config
    local = [Rotary(c.size_of_head, c.rope_theta)] if c.second and c.rope_scaling else []
    return RotaryDecoder(
        c, block, rms_norm, rotaries=(*local, c.rotary), second=c.second, rngs=rngs
    )


loss = language.next_token_loss
objective = language.objective
