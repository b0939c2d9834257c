"""Command R (Cohere, 2024) and Command R7B: one norm before branches side by side, scaled logits.

LayerNorm has no bias, and neighbours are rotated. Command R7B (`cohere2`, arXiv:2504.00698) has
windows, and no rotation in the global layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from jaxspeed import ops

from . import language
from .blocks import Attention, GatedFeedForward, ParallelBranches, swiglu
from .decoder import TINY, RotaryDecoder, WindowedSizes
from .layers import LayerNorm, dropout


@dataclass(frozen=True)
class Config(WindowedSizes):
    """Cohere's sizes; the defaults are those of Command R 35B."""

    hidden_size: int = 8192
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 64
    intermediate_size: int = 22528
    vocab_size: int = 256000
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5  # of LayerNorm
    rope_theta: float = 8000000.0
    attention_bias: bool = False
    qk_norm: bool = False  # of each head of queries and keys
    logit_scale: float = 0.0625
    tie_word_embeddings: bool = True


PRESETS: dict[str, Config] = {
    "tiny": Config(**TINY),
    "tiny2": Config(
        **{**TINY, "num_hidden_layers": 4}, sliding_window=16, global_layers=(3,), logit_scale=0.25
    ),
    "command-r": Config(),
    "command-r7b": replace(
        Config(),
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        max_position_embeddings=132096,
        sliding_window=4096,
        global_layers=tuple(range(3, 32, 4)),
        rope_theta=50000.0,
        logit_scale=0.25,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> ParallelBranches:
    c = config
    return ParallelBranches(
        norm(c, rngs),
        Attention(
            c.projections(bias=c.attention_bias, out_bias=c.attention_bias),
            qk_norm=(lambda dims: norm(c, rngs, dims)) if c.qk_norm else None,
            rotate=ops.rotate_neighbours,
            windows=c.windows,
            rngs=rngs,
        ),
        None,
        GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def norm(config: Config, rngs: nnx.Rngs, dims: dict[str, int] | None = None) -> LayerNorm:
    dims = dims or {"embed": config.hidden_size}
    return LayerNorm(dims, eps=config.rms_norm_eps, bias=False, rngs=rngs)


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    c = config
    return RotaryDecoder(
        c, block, norm, **c.rotated_if_local, hidden_scale=c.logit_scale, rngs=rngs
    )


loss = language.next_token_loss
objective = language.objective
