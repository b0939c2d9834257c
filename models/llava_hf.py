"""LLaVA 1.5 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable

from .image_processors import FixedImages, read_fixed
from .llava import Config
from .vision_hf import (
    CLIP,
    SIGLIP,
    Names,
    all_tables,
    composed,
    linear_rules,
    read_text,
    read_tower,
    tower_table,
    write_text,
    write_tower,
)

PLACE = "<image>"  # of an image in a text; and the token of each of its features
MODEL_TYPES = {"llava": "LlavaForConditionalGeneration"}
FIELDS: tuple[Field | Fixed | Read, ...] = (
    Field("image_token_index", "image_token_id", int, 32000, 0),
    Field("projector_hidden_act", "projector_activation", str, "gelu"),
    Field("multimodal_projector_bias", "projector_bias", bool, True),
    *map(Read, ("text_config", "vision_config", "vision_feature_layer", "image_seq_length")),
    *map(Read, ("vision_feature_select_strategy", "tie_word_embeddings")),
)
_SELECT = {"default": False, "full": True}


def read_config(values: Mapping[str, Any]) -> Config:
    known: list[Field | Fixed | Read] = [
        Field("vision_feature_layer", "feature_layer", int, -2, -(2**20)),
        Fixed("vision_feature_select_strategy", tuple(_SELECT)),
    ]
    return Config(
        read_text(values, ("llama", "mistral", "qwen2", "qwen3")),
        read_tower(values, (CLIP, SIGLIP)),
        **read_fields(values, [*FIELDS, *known]),
        class_features=_SELECT[values.get("vision_feature_select_strategy", "default")],
    )


def write_config(config: Config) -> dict[str, Any]:
    select = next(name for name, full in _SELECT.items() if full == config.class_features)
    return {
        "model_type": "llava",
        "text_config": write_text(config.text),
        "vision_config": write_tower(config.vision),
        **write_fields(config, FIELDS),
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": select,
        "image_seq_length": config.tokens_per_image,
        "tie_word_embeddings": config.text.tie_word_embeddings,
    }


def image_processor(config: Config, values: Mapping[str, Any] | None) -> FixedImages:
    """How images are read, by the folder's settings or as CLIP's were trained."""
    c, side = config, config.vision.image_size
    default = FixedImages(
        PLACE,
        PLACE,
        c.image_token_id,
        c.tokens_per_image,
        c.vision.patch_size,
        (side,),
        (side, side),
    )
    return read_fixed(values, default)


def _table(config: Config, names: Names) -> MappingTable:
    projector = [
        rule
        for theirs, ours in (("linear_1", "up"), ("linear_2", "out"))
        for rule in linear_rules(f"{names.projector}.{theirs}", f"projector/{ours}")
    ]
    tower = tower_table(config.vision, names.tower, layers=config.layers, last_norm=False)
    return composed(config, names, tower, projector)


table, OTHER_TABLES = all_tables(_table)
