"""Language models that see: a tower of images, a projector, and a decoder of any family.

A batch is one of `language.py`, with further arrays:

| key | shape | meaning |
|---|---|---|
| patches | [batch, rows, patch] | the images of each sample; see `vision.py` |
| patch_places | [batch, rows, 3] | of images of any size: each patch's image, row and column |
| image_rows | as tokens | optional: the row of the image features of each token, or -1 |
| image_positions | [batch, seq, 3] | optional: a token's time, row and column, in rotations |

The tokens that stand for an image are replaced by its features. Without `image_rows`, the n-th of
them in a sample stands for its n-th row of features. The last two are computed along the sequence
where they are absent, which an axis `seq` does not allow.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed import ops

from . import language, vision
from .blocks import WithImages
from .cached_attention import CachedAttention
from .decoder import DecoderSizes, RotaryDecoder

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts; what is asked of a decoder's is that of its text model."""

    PARTS: ClassVar[tuple[str, ...]] = ("text", "vision")
    SEES_IMAGES_ENTIRE: ClassVar[bool] = False  # tokens of an image see all of it

    text: DecoderSizes
    vision: vision.Config
    image_token_id: int

    @property
    def tokens_per_image(self) -> int:
        return self.vision.num_patches

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text.hidden_size

    @property
    def max_position_embeddings(self) -> int:
        return self.text.max_position_embeddings

    @property
    def tie_word_embeddings(self) -> bool:
        return self.text.tie_word_embeddings


class VisionLanguage(nnx.Module):
    """A tower, a projector of its features, and a language model.

    Args:
      tower: as `vision.Tower`.
      projector: from a tower's output [images, patches, embed] to [images, tokens, text embed].
    """

    def __init__(self, config: Any, tower: Any, projector: Any, language: RotaryDecoder):
        self.config = config
        self.tower, self.projector, self.language = tower, projector, language

    @property
    def head_weight(self) -> jax.Array:
        return self.language.head_weight

    @property
    def vocab_chunk(self) -> int | None:
        return self.language.vocab_chunk

    @property
    def logit_soft_cap(self) -> float | None:
        return self.language.logit_soft_cap

    def features(self, patches: jax.Array, patch_places: jax.Array | None = None) -> jax.Array:
        """[batch, rows, patch] to what stands for tokens, [batch, tokens of images, embed]."""
        images = vision.images_of(patches, self.config.vision)
        x: jax.Array = self.projector(self.tower(images))
        return x.reshape(patches.shape[0], -1, x.shape[-1])

    def hidden(
        self,
        tokens: jax.Array,
        *,
        patches: jax.Array | None = None,
        patch_places: jax.Array | None = None,
        image_rows: jax.Array | None = None,
        image_positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """tokens [batch, seq] to the head's input, [batch, seq, embed]; see the batch's arrays."""
        x = self.language.embedding(tokens)
        seen: Any = segment_ids
        if patches is not None:
            features = self.features(patches, patch_places)
            if image_rows is None:
                is_image = tokens == self.config.image_token_id
                image_rows = jnp.where(is_image, jnp.cumsum(is_image, axis=1) - 1, -1)
            at = jnp.clip(image_rows, 0)[..., None]
            there = jnp.take_along_axis(features, at, axis=1, mode="fill", fill_value=jnp.nan)
            x = jnp.where(image_rows[..., None] >= 0, there.astype(x.dtype), x)
            if self.config.SEES_IMAGES_ENTIRE:
                _note_mask()
                numbers = jnp.where(image_rows >= 0, image_rows // self.config.tokens_per_image, -1)
                seen = WithImages(segment_ids, numbers)
            if image_positions is None and patch_places is not None:
                image_positions = self.positions_of(image_rows, patch_places, segment_ids)
        rotated_at = self.rotated_at(image_positions, positions)
        return self.language.hidden(
            tokens, x=x, segment_ids=seen, positions=positions, rotated_at=rotated_at
        )

    def positions_of(
        self, image_rows: jax.Array, patch_places: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        """What rotations read of positions, of a model whose images have rows and columns."""
        raise NotImplementedError

    def rotated_at(
        self, image_positions: jax.Array | None, positions: jax.Array | None
    ) -> jax.Array | None:
        """The positions of rotations; None: those of the tokens."""
        return None

    def __call__(
        self,
        tokens: jax.Array,
        *,
        patches: jax.Array | None = None,
        patch_places: jax.Array | None = None,
        positions: jax.Array | None = None,
        at: jax.Array | None = None,
        **context: jax.Array | None,
    ) -> jax.Array:
        """Logits as `language.Decoder`'s; `context` as in `hidden`."""
        of_images = {"patches": patches, "patch_places": patch_places}
        hidden = self.hidden(tokens, positions=positions, **of_images, **context)
        return language.logits(self, hidden, at)

    def init_cache(self, rows: int, length: int, dtype: Any) -> None:
        """Caches of the language model; the features of images are among its keys."""
        for _, module in nnx.iter_modules(self.language):
            if isinstance(module, CachedAttention):
                module.init_cache(rows, length, dtype)


@functools.cache
def _note_mask() -> None:
    """Log once what a mask costs that no kernel has."""
    log.info(
        "tokens of an image see all of it: the scores of the language model's attention are "
        "materialized in batches with images"
    )


def text_model(config: DecoderSizes, rngs: nnx.Rngs) -> RotaryDecoder:
    """The language model of a family's config."""
    model = sys.modules[type(config).__module__].build(config, rngs)
    assert isinstance(model, RotaryDecoder), "a decoder whose embeddings can be replaced"
    return model


def text_form(config: DecoderSizes) -> Any:
    """The module with its form in Hugging Face's files."""
    return importlib.import_module(f"{type(config).__module__}_hf")


def objective(config: Any) -> str:
    return "next_token"


def loss(model: VisionLanguage, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of the cross-entropy of each token's successor."""
    p = ops.split_batch(batch)
    of_tokens = {name: batch.get(name) for name in ("image_rows", "image_positions")}
    hidden = model.hidden(
        p.tokens,
        patches=batch.get("patches"),
        patch_places=batch.get("patch_places"),
        **{n: None if x is None else x[:, : p.tokens.shape[1]] for n, x in of_tokens.items()},
        segment_ids=p.segment_ids,
        positions=p.positions,
    )
    return language.cross_entropy(model, hidden, p.targets)
