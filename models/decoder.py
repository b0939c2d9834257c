"""Language models of stacked blocks with rotary positions: their sizes, and the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jaxspeed import ops

from . import language
from .blocks import Projections, WithImages
from .layers import Embedding, RMSNorm, check_heads, normal, scan_blocks, stacked

# Sizes of the presets `tiny`.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


class Rotary(NamedTuple):
    """Rotary positions of the first `dims` dims of a head."""

    dims: int
    theta: float
    scaling: ops.Scaling | None = None

    def at(self, positions: jax.Array) -> ops.Rotation:
        return ops.rotation(positions, ops.frequencies(*self), self.scaling)


@dataclass(frozen=True)
class DecoderSizes(language.DecoderHead):
    """Fields that the configs of all these families have; the defaults are those of Llama 3 8B."""

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    vocab_size: int = 128256
    max_position_embeddings: int = 8192  # trained context length; no array has this size
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: ops.Scaling | None = None  # or a mapping of its fields and rope_type
    initializer_range: float = 0.02
    dropout: float = 0.0
    tie_word_embeddings: bool = False
    unroll: int | bool = 1  # of the scan over layers
    vocab_chunk: int | None = None  # columns of the head per chunk in the loss; None: automatic

    def __post_init__(self) -> None:
        width = self.size_of_head * self.num_attention_heads if self.head_dim else self.hidden_size
        check_heads(width, self.num_attention_heads, self.num_key_value_heads)
        scaling: Any = self.rope_scaling
        if isinstance(scaling, Mapping):
            object.__setattr__(self, "rope_scaling", ops.rope_scaling(scaling))
        ops.frequencies(*self.rotary)  # or an error
        dims = self.rotary.dims
        if not 0 < dims <= self.size_of_head or dims % 2:
            raise ValueError(
                f"{dims} of the {self.size_of_head} dims of a head are rotated; these are pairs"
            )

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def rotary(self) -> Rotary:
        factor = getattr(self, "partial_rotary_factor", 1.0)
        return Rotary(int(factor * self.size_of_head), self.rope_theta, self.rope_scaling)

    @property
    def init(self) -> Initializer:
        return normal(self.initializer_range)

    def projections(self, **more: Any) -> Projections:
        """Those of attention, with further fields."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        return Projections(
            self.hidden_size, heads, kv_heads, self.size_of_head, init=self.init, **more
        )


@dataclass(frozen=True)
class WindowedSizes(DecoderSizes):
    """Sizes of decoders with a sliding window in all layers but the global ones."""

    sliding_window: int | None = None
    global_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "global_layers", tuple(self.global_layers))

    @property
    def is_global(self) -> list[bool]:
        """[layers], whether a layer sees all tokens before."""
        return [layer in self.global_layers for layer in range(self.num_hidden_layers)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of all layers, or of local and global ones."""
        layers = {layer for layer in self.global_layers if 0 <= layer < self.num_hidden_layers}
        if not layers or self.sliding_window is None:
            return (self.sliding_window,)
        return (None,) if len(layers) == self.num_hidden_layers else (self.sliding_window, None)

    @property
    def second(self) -> list[bool] | None:
        """`is_global` where windows differ."""
        return self.is_global if len(self.windows) > 1 else None

    @property
    def rotated_if_local(self) -> dict[str, Any]:
        """A decoder's options where global layers are not rotated, if there is a window at all."""
        if self.sliding_window is None:
            return {"rotaries": (self.rotary,)}
        return {"rotaries": (self.rotary, None), "second": self.is_global}


class RotaryDecoder(language.Decoder):
    """An embedding, stacked blocks, a norm, and a head that may be tied to the embedding.

    Args:
      block: makes a block of a config.
      norm: makes the last norm of a config.
      rotaries: of all layers, or of each of the two kinds of layers; None: no rotation.
      second: whether each layer is of the second kind.
      layers: number of blocks; that of the config by default.
      embed_scale: of the embeddings.
      hidden_scale: of the head's input.
    """

    def __init__(
        self,
        config: Any,
        block: Callable[[Any, nnx.Rngs], nnx.Module],
        norm: Callable[[Any, nnx.Rngs], nnx.Module],
        *,
        rotaries: Sequence[Rotary | None],
        second: Sequence[bool] | None = None,
        layers: int | None = None,
        embed_scale: float = 1.0,
        hidden_scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        c = config
        self.config = config
        self.rotaries = tuple(rotaries)
        self.second = None if second is None else tuple(second)
        self.embed_scale, self.hidden_scale = embed_scale, hidden_scale
        self.embed = Embedding(c.vocab_size, c.hidden_size, init=c.init, rngs=rngs)
        self.blocks = stacked(lambda rngs: block(c, rngs), layers or c.num_hidden_layers, rngs)
        self.norm = norm(c, rngs)
        self.add_head(c.init, rngs)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        x: jax.Array | None = None,
        segment_ids: jax.Array | WithImages | None = None,
        positions: jax.Array | None = None,
        rotated_at: jax.Array | None = None,
    ) -> jax.Array:
        """tokens [batch, seq] to the head's input, [batch, seq, embed].

        `x` [batch, seq, embed] is in place of the tokens' embeddings, `rotated_at` of positions in
        rotations, where it may be one of each frequency [batch, seq, frequencies].
        """
        x, context, each = self.embedded(tokens, segment_ids, positions, x, rotated_at)
        return self.normed(
            scan_blocks(self.blocks, x, *context, each=each, unroll=self.config.unroll)
        )

    def embedding(self, tokens: jax.Array) -> jax.Array:
        """tokens [batch, seq] to the blocks' input."""
        return _times(self.embed(tokens), self.embed_scale)

    def embedded(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | WithImages | None,
        positions: jax.Array | None,
        x: jax.Array | None = None,
        rotated_at: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], tuple[jax.Array, ...]]:
        """(the blocks' input, what all blocks get, what each has of its own)."""
        read = jnp.arange(tokens.shape[1]) if positions is None else positions
        read = read if rotated_at is None else rotated_at
        by = [None if rotary is None else rotary.at(read) for rotary in self.rotaries]
        rotations = [_identity(by) if rotation is None else rotation for rotation in by]
        each = () if self.second is None else (jnp.asarray(self.second),)
        x = self.embedding(tokens) if x is None else x
        return x, (rotations, segment_ids, positions), each

    def normed(self, x: jax.Array) -> jax.Array:
        """The blocks' output to the head's input."""
        return _times(self.norm(x), self.hidden_scale)


def rms_norm(config: DecoderSizes, rngs: nnx.Rngs) -> RMSNorm:
    """Over the hidden size."""
    return RMSNorm({"embed": config.hidden_size}, eps=config.rms_norm_eps, rngs=rngs)


def _identity(rotations: Sequence[ops.Rotation | None]) -> ops.Rotation:
    """The rotation by 0 of the shape of those of the other kind of layers."""
    other = next(rotation for rotation in rotations if rotation is not None)
    return ops.Rotation(jnp.ones_like(other.cos), jnp.zeros_like(other.sin))


def _times(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)  # rounded, as in training
