"""Qwen2.5-VL in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from . import hf_form
from .image_processors import NativeImages, read_native
from .qwen2_5_vl import Config, TowerConfig
from .vision_hf import Names, composed, linear_rules

PLACE = "<|image_pad|>"
MODEL_TYPES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
FIELDS: tuple[Field | Fixed | Read, ...] = (
    Field("image_token_id", "image_token_id", int, 151655, 0),
    *map(Read, ("text_config", "vision_config", "video_token_id", "tie_word_embeddings")),
    *map(Read, ("vision_start_token_id", "vision_end_token_id", "vision_token_id")),
    *map(Read, ("rope_scaling", "rope_parameters")),
)
TOWER: tuple[Field | Fixed | Read, ...] = (
    Field("hidden_size", "hidden_size", int, 3584),
    Field("intermediate_size", "intermediate_size", int, 3420),
    Field("depth", "num_hidden_layers", int, 32),
    Field("num_heads", "num_attention_heads", int, 16),
    Field("patch_size", "patch_size", int, 14),
    Field("in_channels", "num_channels", int, 3),
    Field("temporal_patch_size", "frames", int, 2),
    Field("spatial_merge_size", "merged", int, 2),
    Field("window_size", "window_size", int, 112),
    Field("hidden_act", "activation", str, "silu"),
    Field("initializer_range", "initializer_range", float, 0.02),
)
_TEXT = "qwen2"  # the language model's type alone
_SECTIONS = "mrope_section"


def read_config(values: Mapping[str, Any]) -> Config:
    text, sections = read_text(values)
    vision = dict(values.get("vision_config") or {})
    full = vision.get("fullatt_block_indexes", (7, 15, 23, 31))
    # Published files have another name for the number of channels.
    vision.setdefault("in_channels", vision.pop("in_chans", 3))
    where = "config.json: vision_config"
    tower = TowerConfig(**read_fields(vision, TOWER, where), full_layers=tuple(full))
    return Config(text, tower, **read_fields(values, FIELDS), sections=sections)


def read_text(values: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """(the language model's config, the sections of its frequencies)."""
    # Published files have the text model's fields beside `vision_config`.
    text = {n: x for n, x in values.items() if not isinstance(x, Mapping)}
    text |= {n: values[n] for n in ("rope_scaling", "rope_parameters") if n in values}
    text |= values.get("text_config") or {}
    rope = dict(text.pop("rope_parameters", None) or text.pop("rope_scaling", None) or {})
    text.pop("rope_scaling", None)
    sections = tuple(rope.pop(_SECTIONS, (16, 24, 24)))
    if rope.get("rope_type", rope.get("type")) in ("mrope", "default"):
        rope = {n: x for n, x in rope.items() if n not in ("rope_type", "type")}
        rope = {"rope_type": "default", **rope} if rope else {}
    theta = rope.pop("rope_theta", None) or text.get("rope_theta", 1e6)
    if rope and rope != {"rope_type": "default"}:
        text["rope_parameters"] = rope
    tied = bool(values.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    more = {"model_type": _TEXT, "rope_theta": theta, "tie_word_embeddings": tied}
    return hf_form("llama").read_config({"rms_norm_eps": 1e-5, **text, **more}), sections


def write_config(config: Config) -> dict[str, Any]:
    text = hf_form("llama").write_config(config.text)
    for name in ("rope_scaling", "head_dim", "attention_bias", "mlp_bias"):
        text.pop(name, None)
    sections = {_SECTIONS: list(config.sections)}
    rope = {"rope_parameters": text["rope_parameters"] | sections}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": {**text, **rope, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            **write_fields(config.vision, TOWER),
            "fullatt_block_indexes": list(config.vision.full_layers),
            "out_hidden_size": config.text.hidden_size,
        },
        **write_fields(config, FIELDS),
        "tie_word_embeddings": config.text.tie_word_embeddings,
    }


def image_processor(config: Config, values: Mapping[str, Any] | None) -> NativeImages:
    """How images are read, by the folder's settings or within Qwen's bounds."""
    c = config
    default = NativeImages(
        PLACE, PLACE, c.image_token_id, c.vision.patch_size, merged=c.vision.merged
    )
    return read_native(values, default)


FILES = Names("visual.", "visual.merger", "model.", "lm_head.")
MEMORY = Names("model.visual.", "model.visual.merger", "model.language_model.", "lm_head.")


def _table(config: Config, names: Names) -> MappingTable:
    c, block = config, f"{names.tower}blocks.{{layer}}"
    qkv = tuple(f"tower/blocks/attn/{name}_proj" for name in "qkv")
    window = {"row": c.vision.patch_size, "column": c.vision.patch_size}
    rules = [
        TensorRule(
            f"{names.tower}patch_embed.proj.weight",
            "tower/patches",
            "embed channel frame row column -> frame (row column channel) embed",
            window,
        ),
        TensorRule(
            f"{block}.attn.qkv.weight",
            tuple(f"{path}/kernel" for path in qkv),
            "(part heads dim) embed -> layer embed heads dim",
        ),
        TensorRule(
            f"{block}.attn.qkv.bias",
            tuple(f"{path}/bias" for path in qkv),
            "(part heads dim) -> layer heads dim",
        ),
        TensorRule(
            f"{block}.attn.proj.weight",
            "tower/blocks/attn/o_proj/kernel",
            "embed (heads dim) -> layer heads dim embed",
        ),
        TensorRule(f"{block}.attn.proj.bias", "tower/blocks/attn/o_proj/bias"),
        TensorRule(f"{block}.norm1.weight", "tower/blocks/attn_norm/scale"),
        TensorRule(f"{block}.norm2.weight", "tower/blocks/mlp_norm/scale"),
    ]
    for name in ("gate", "up", "down"):
        theirs, ours = f"{block}.mlp.{name}_proj", f"tower/blocks/mlp/{name}"
        rules.append(TensorRule(f"{theirs}.weight", f"{ours}/kernel", "out in -> layer in out"))
        rules.append(TensorRule(f"{theirs}.bias", f"{ours}/bias"))
    merger = [
        TensorRule(f"{names.projector}.ln_q.weight", "projector/norm/scale"),
        *linear_rules(f"{names.projector}.mlp.0", "projector/up"),
        *linear_rules(f"{names.projector}.mlp.2", "projector/down"),
    ]
    return composed(config, names, MappingTable(rules), merger)


def in_memory(config: Config) -> MappingTable:
    """With the names that transformers 5 has in memory."""
    return _table(config, MEMORY)


def table(config: Config) -> MappingTable:
    return replace(_table(config, FILES), memory=in_memory(config))


OTHER_TABLES = {"model.visual.patch_embed.proj.weight": in_memory}
