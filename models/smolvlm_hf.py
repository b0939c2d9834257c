"""SmolVLM and Idefics 3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .image_processors import TiledImages, read_tiled
from .smolvlm import Config
from .vision_hf import (
    BUCKETED,
    Names,
    composed,
    read_text,
    read_tower,
    tower_table,
    write_text,
    write_tower,
)

MODEL_TYPES = {
    "smolvlm": "SmolVLMForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
}
FIELDS: tuple[Field | Fixed | Read, ...] = (
    Field("image_token_id", "image_token_id", int, 128257, 0),
    Field("scale_factor", "scale_factor", int, 2),
    *map(Read, ("text_config", "vision_config", "tie_word_embeddings")),
)
# The fields that text_config lacks have other values than those of Llama.
TEXT = {"rms_norm_eps": 1e-5}


def read_config(values: Mapping[str, Any]) -> Config:
    outer = {"tie_word_embeddings": values.get("tie_word_embeddings", False)}
    if isinstance(text := values.get("text_config"), Mapping):
        outer["text_config"] = TEXT | dict(text)
    config = read_text(outer, ("llama",))
    return Config(config, read_tower(values, BUCKETED), **read_fields(values, FIELDS))


def write_config(config: Config) -> dict[str, Any]:
    return {
        "model_type": "smolvlm",
        "text_config": write_text(config.text),
        "vision_config": write_tower(config.vision),
        **write_fields(config, FIELDS),
        "tie_word_embeddings": config.text.tie_word_embeddings,
    }


def image_processor(config: Config, values: Mapping[str, Any] | None) -> TiledImages:
    """How images are read, by the folder's settings or in at most 4 x 4 tiles."""
    c, side = config, config.vision.image_size
    default = TiledImages(
        "<image>",
        "<image>",
        c.image_token_id,
        c.tokens_per_image,
        c.vision.patch_size,
        side,
        4 * side,
    )
    return read_tiled(values, default)


_NAMES = Names(
    "model.vision_model.", "model.connector.modality_projection", "model.text_model.", "lm_head."
)


def table(config: Config) -> MappingTable:
    projector = [
        TensorRule(f"{_NAMES.projector}.proj.weight", "projector/proj/kernel", "out in -> in out")
    ]
    return composed(config, _NAMES, tower_table(config.vision, _NAMES.tower), projector)
