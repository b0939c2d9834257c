"""EXAONE 4 (arXiv:2507.11407): norms after the branches, and of each head of queries and keys.

The large one has windows, and no rotation in the global layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from . import language
from .blocks import Attention, GatedFeedForward, NormAfter, swiglu
from .decoder import TINY, RotaryDecoder, WindowedSizes, rms_norm
from .layers import RMSNorm, dropout


@dataclass(frozen=True)
class Config(WindowedSizes):
    """EXAONE's sizes; the defaults are those of EXAONE 4 1.2B."""

    hidden_size: int = 2048
    num_hidden_layers: int = 30
    intermediate_size: int = 4096
    vocab_size: int = 102400
    max_position_embeddings: int = 65536
    rope_theta: float = 1000000.0
    tie_word_embeddings: bool = True


PRESETS: dict[str, Config] = {
    "tiny": Config(**{**TINY, "num_hidden_layers": 4}, sliding_window=16, global_layers=(3,)),
    "exaone4-1.2b": Config(),
    "exaone4-32b": replace(
        Config(),
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=40,
        head_dim=128,
        intermediate_size=27392,
        max_position_embeddings=131072,
        sliding_window=4096,
        global_layers=tuple(range(3, 64, 4)),
        tie_word_embeddings=False,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormAfter:
    c = config

    def head_norm(dims: dict[str, int]) -> RMSNorm:
        return RMSNorm({"head_dim": dims["head_dim"]}, eps=c.rms_norm_eps, rngs=rngs)

    return NormAfter(
        Attention(c.projections(), qk_norm=head_norm, windows=c.windows, rngs=rngs),
        rms_norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs),
        rms_norm(c, rngs),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(config, block, rms_norm, **config.rotated_if_local, rngs=rngs)


loss = language.next_token_loss
objective = language.objective
