"""ViT in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.config_fields import Field, Fixed, read_fields, write_fields
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .classification_hf import count_labels, write_labels
from .vit import Config

MODEL_TYPES = {"vit": "ViTForImageClassification"}

FIELDS = (
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_hidden_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "intermediate_size"),
    Field("image_size", "image_size"),
    Field("patch_size", "patch_size"),
    Field("num_channels", "num_channels", int, 3),
    Field("layer_norm_eps", "layer_norm_eps", float, 1e-12),
    Field("initializer_range", "initializer_range", float, 0.02),
    Fixed("hidden_act", ("gelu",)),
    Fixed("qkv_bias", (True,)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    return Config(**read_fields(values, FIELDS), num_classes=count_labels(values))


def write_config(config: Config) -> dict[str, Any]:
    written = write_fields(config, FIELDS)
    written["intermediate_size"] = config.intermediate_size or 4 * config.hidden_size
    return {"model_type": "vit", **written, **write_labels(config.num_classes)}


def table(config: Config) -> MappingTable:
    """Patches are a convolution there, whose window is a dim here: row, column, channel."""
    block, ours = "vit.encoder.layer.{layer}", "blocks"
    linear = {
        "intermediate.dense": "mlp/up",
        "output.dense": "mlp/down",
    }
    norms = {"layernorm_before": "attn_norm", "layernorm_after": "mlp_norm"}
    qkv = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    window = {"row": config.patch_size, "column": config.patch_size}
    patches = "vit.embeddings.patch_embeddings.projection"
    output = f"{block}.attention.output.dense"
    rules = [
        TensorRule(
            f"{patches}.weight",
            "patches/kernel",
            "embed channel row column -> (row column channel) embed",
            window,
        ),
        TensorRule(f"{patches}.bias", "patches/bias"),
        TensorRule("vit.embeddings.cls_token", "class_token", "1 1 embed -> embed"),
        TensorRule("vit.embeddings.position_embeddings", "positions", "1 pos embed -> pos embed"),
        TensorRule(
            f"{output}.weight",
            f"{ours}/attn/o_proj/kernel",
            "embed (heads dim) -> layer heads dim embed",
        ),
        TensorRule(f"{output}.bias", f"{ours}/attn/o_proj/bias"),
        TensorRule("vit.layernorm.weight", "norm/scale"),
        TensorRule("vit.layernorm.bias", "norm/bias"),
        TensorRule("classifier.weight", "head/kernel", "classes embed -> embed classes"),
        TensorRule("classifier.bias", "head/bias"),
    ]
    for theirs, name in qkv.items():
        rules += [
            TensorRule(
                f"{block}.attention.attention.{theirs}.weight",
                f"{ours}/attn/{name}/kernel",
                "(heads dim) embed -> layer embed heads dim",
            ),
            TensorRule(
                f"{block}.attention.attention.{theirs}.bias",
                f"{ours}/attn/{name}/bias",
                "(heads dim) -> layer heads dim",
            ),
        ]
    for theirs, name in linear.items():
        rules += [
            TensorRule(
                f"{block}.{theirs}.weight", f"{ours}/{name}/kernel", "out in -> layer in out"
            ),
            TensorRule(f"{block}.{theirs}.bias", f"{ours}/{name}/bias"),
        ]
    for theirs, name in norms.items():
        rules += [
            TensorRule(f"{block}.{theirs}.weight", f"{ours}/{name}/scale"),
            TensorRule(f"{block}.{theirs}.bias", f"{ours}/{name}/bias"),
        ]
    in_memory = {
        **{f"attention.attention.{n}": f"attention.{qkv[n]}" for n in qkv},
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        **{name: name for name in norms},
    }
    layer = "vit.layers.{layer}"
    modules = {f"{block}.{name}": f"{layer}.{other}" for name, other in in_memory.items()}
    return MappingTable(rules, modules=modules)
