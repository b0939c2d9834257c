"""Gemma 3 with images in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .gemma3 import Config
from .image_processors import BILINEAR, HALF, FixedImages, read_fixed
from .vision_hf import (
    SIGLIP,
    Names,
    all_tables,
    composed,
    read_text,
    read_tower,
    tower_table,
    write_text,
    write_tower,
)

MODEL_TYPES = {"gemma3": "Gemma3ForConditionalGeneration"}
FIELDS: tuple[Field | Fixed | Read, ...] = (
    Field("image_token_index", "image_token_id", int, 262144, 0),
    Field("boi_token_index", "begin_token_id", int, 255999, 0),
    Field("eoi_token_index", "end_token_id", int, 256000, 0),
    Field("mm_tokens_per_image", "mm_tokens_per_image", int, 256),
    *map(Read, ("text_config", "vision_config", "initializer_range", "tie_word_embeddings")),
)


def read_config(values: Mapping[str, Any]) -> Config:
    text = read_text(values, ("gemma3_text",))
    return Config(text, read_tower(values, (SIGLIP,)), **read_fields(values, FIELDS))


def write_config(config: Config) -> dict[str, Any]:
    return {
        "model_type": "gemma3",
        "text_config": write_text(config.text),
        "vision_config": write_tower(config.vision),
        **write_fields(config, FIELDS),
        "initializer_range": config.text.initializer_range,
        "tie_word_embeddings": config.text.tie_word_embeddings,
    }


def image_processor(config: Config, values: Mapping[str, Any] | None) -> FixedImages:
    """How images are read, by the folder's settings or as Gemma 3's were trained."""
    c, side = config, config.vision.image_size
    default = FixedImages(
        "<start_of_image>",
        "<image_soft_token>",
        c.image_token_id,
        c.tokens_per_image,
        c.vision.patch_size,
        (side, side),
        resample=BILINEAR,
        mean=HALF,
        std=HALF,
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
    )
    return read_fixed(values, default)


def _table(config: Config, names: Names) -> MappingTable:
    projector = [
        TensorRule(
            f"{names.projector}.mm_input_projection_weight", "projector/kernel", kind="conv1d"
        ),
        TensorRule(f"{names.projector}.mm_soft_emb_norm.weight", "projector/norm/scale"),
    ]
    return composed(config, names, tower_table(config.vision, names.tower), projector)


table, OTHER_TABLES = all_tables(_table)
