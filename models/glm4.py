"""GLM-4 (arXiv:2406.12793) and GLM-4-0414: half of each head is rotated, in pairs of neighbours.

GLM-4-0414 has norms of the branches' outputs, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from jaxspeed import ops

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, NormBoth, swiglu
from .decoder import TINY, DecoderSizes, RotaryDecoder, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(DecoderSizes):
    """GLM-4's sizes; the defaults are those of GLM-4 9B 0414."""

    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 13696
    vocab_size: int = 151552
    max_position_embeddings: int = 32768
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5  # of the dims of a head
    attention_bias: bool = True  # of queries, keys and values
    output_norms: bool = True


_9B = Config()
_TINY = Config(**TINY, head_dim=16)

PRESETS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-glm": replace(_TINY, output_norms=False),
    "glm4-9b-chat": replace(
        _9B, max_position_embeddings=131072, rms_norm_eps=1.5625e-7, output_norms=False
    ),
    "glm4-9b-0414": _9B,
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore | NormBoth:
    c = config
    attention = Attention(
        c.projections(bias=c.attention_bias), rotate=ops.rotate_neighbours, rngs=rngs
    )
    mlp = GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs)
    norms = [rms_norm(c, rngs) for _ in range(4 if c.output_norms else 2)]
    if not c.output_norms:
        return NormBefore(norms[0], attention, norms[1], mlp, dropout(c.dropout, rngs))
    before, after, mlp_before, mlp_after = norms
    return NormBoth(before, attention, after, mlp_before, mlp, mlp_after, dropout(c.dropout, rngs))


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(config, block, rms_norm, rotaries=(config.rotary,), rngs=rngs)


loss = language.next_token_loss
objective = language.objective
