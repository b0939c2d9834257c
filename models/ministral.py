"""Ministral (Mistral AI, 2024): Llama's blocks with a sliding window, in all layers or in some.

Ministral 3 (2025) has no window; its queries grow with their positions, as those of Llama 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed import ops

from . import language
from .blocks import Attention, GatedFeedForward, NormBefore, swiglu
from .decoder import TINY, RotaryDecoder, WindowedSizes, rms_norm
from .layers import dropout


@dataclass(frozen=True)
class Config(WindowedSizes):
    """Ministral's sizes; the defaults are those of Ministral 8B."""

    num_hidden_layers: int = 36
    intermediate_size: int = 12288
    vocab_size: int = 131072
    max_position_embeddings: int = 32768
    rope_theta: float = 100000000.0
    sliding_window: int | None = 32768
    query_growth: float | None = None  # beta of GrowingQueries; rope_scaling has their context

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_growth is not None and self.context is None:
            raise ValueError("query_growth needs a rope_scaling with its original context")

    @property
    def context(self) -> int | None:
        """The number of tokens after which queries grow."""
        return getattr(self.rope_scaling, "original_max_position_embeddings", None)


@dataclass(frozen=True)
class GrowingQueries:
    """1 + beta ln(1 + floor(position / context))."""

    beta: float
    context: int

    def __call__(self, positions: jax.Array) -> jax.Array:
        return 1 + self.beta * jnp.log1p((positions // self.context).astype(jnp.float32))


PRESETS: dict[str, Config] = {
    "tiny": Config(**{**TINY, "num_hidden_layers": 4}, sliding_window=16, global_layers=(0,)),
    "ministral-8b": Config(),
    "ministral3-8b": replace(
        Config(),
        num_hidden_layers=34,
        intermediate_size=14336,
        max_position_embeddings=262144,
        rope_theta=1000000.0,
        rope_scaling=ops.YarnScaling(16.0, 16384, mscale=1.0, mscale_all_dim=1.0),
        sliding_window=None,
        query_growth=0.1,
    ),
}


def block(config: Config, rngs: nnx.Rngs) -> NormBefore:
    c = config
    growth = None
    if c.query_growth is not None and c.context is not None:
        growth = GrowingQueries(c.query_growth, c.context)
    return NormBefore(
        rms_norm(c, rngs),
        Attention(
            c.projections(),
            query_scale=growth,
            windows=c.windows,
            rngs=rngs,
        ),
        rms_norm(c, rngs),
        GatedFeedForward(c.hidden_size, c.intermediate_size, swiglu, init=c.init, rngs=rngs),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> RotaryDecoder:
    return RotaryDecoder(
        config, block, rms_norm, rotaries=(config.rotary,), second=config.second, rngs=rngs
    )


loss = language.next_token_loss
objective = language.objective
