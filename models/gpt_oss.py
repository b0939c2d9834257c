"""gpt-oss (OpenAI, 2025): attention with sinks in alternating windows, experts with biases.

The experts' SwiGLU is clamped, and its gate has a gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed import ops

from . import mixture
from .blocks import Attention, of_kinds
from .decoder import TINY, rms_norm
from .layers import dropout
from .mixture import Experts, MixtureBlock, MixtureDecoder, MixtureSizes

_YARN = ops.YarnScaling(32.0, 4096, truncate=False)


@dataclass(frozen=True)
class Config(MixtureSizes):
    """Sizes; the defaults are those of gpt-oss-120b. `intermediate_size` is an expert's."""

    hidden_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    head_dim: int | None = 64
    intermediate_size: int = 2880
    vocab_size: int = 201088
    max_position_embeddings: int = 131072
    rope_theta: float = 150000.0
    rope_scaling: ops.Scaling | None = _YARN
    sliding_window: int = 128  # of local layers
    global_layers: tuple[int, ...] | None = None  # None: every second one, from the second
    num_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_layers is not None:
            object.__setattr__(self, "global_layers", tuple(self.global_layers))

    @property
    def is_global(self) -> list[bool]:
        """[layers], whether a layer sees all tokens before."""
        layers = range(self.num_hidden_layers)
        chosen = layers[1::2] if self.global_layers is None else self.global_layers
        return [layer in chosen for layer in layers]

    @property
    def routing(self) -> dict[str, Any]:
        return {**super().routing, "scores": "softmax_of_top"}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """(u + 1) g sigmoid(alpha g), with the gate g and u at most `limit`, and u at least -limit."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        @ops.saves_inputs
        def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
            return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)

        return clamped(gate, up)


_120B = Config()

PRESETS: dict[str, Config] = {
    "tiny": Config(
        **{**TINY, "num_hidden_layers": 4}, head_dim=16, sliding_window=16, num_experts=8
    ),
    "gpt-oss-20b": replace(_120B, num_hidden_layers=24, num_experts=32),
    "gpt-oss-120b": _120B,
}


def block(config: Config, rngs: nnx.Rngs) -> MixtureBlock:
    c = config
    return MixtureBlock(
        rms_norm(c, rngs),
        Attention(
            c.projections(bias=True, out_bias=True),
            windows=of_kinds(c.is_global, c.sliding_window, None),
            sinks=True,
            rngs=rngs,
        ),
        rms_norm(c, rngs),
        Experts(
            c,
            c.intermediate_size,
            activation=ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit),
            bias=True,
            rngs=rngs,
        ),
        dropout(c.dropout, rngs),
    )


def build(config: Config, rngs: nnx.Rngs) -> MixtureDecoder:
    return MixtureDecoder(
        config, block, rms_norm, rotaries=(config.rotary,), second=config.is_global, rngs=rngs
    )


loss = mixture.loss
objective = mixture.objective
