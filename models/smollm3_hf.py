"""SmolLM3 in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read, read_fields
from jaxspeed.interop.mapping import MappingTable

from .decoder_hf import (
    ATTENTION,
    GATED,
    GLOBAL,
    LOCAL,
    NORMS_BEFORE,
    decoder_table,
    read_layers,
    read_sizes,
    size_fields,
    write_sizes,
)
from .smollm3 import Config

MODEL_TYPES = {"smollm3": "SmolLM3ForCausalLM"}
FIELDS = (
    *size_fields(num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=True),
    Field("attention_bias", "attention_bias", bool, False),
    Field("mlp_bias", "mlp_bias", bool, False),
    *map(Read, ("no_rope_layers", "no_rope_layer_interval", "layer_types")),
    *map(Read, ("use_sliding_window", "sliding_window", "max_window_layers")),
    Fixed("hidden_act", ("silu",)),
)


def read_config(values: Mapping[str, Any]) -> Config:
    found = read_sizes(values, FIELDS, 2000000.0)
    layers = found["num_hidden_layers"]
    rotated = values.get("no_rope_layers")  # 1 where there is a rotation
    if rotated is None:
        period = values.get("no_rope_layer_interval", 4)
        rotated = [(layer + 1) % period for layer in range(layers)]
    if len(rotated) < layers:
        raise PretrainedError(
            f"config.json: no_rope_layers has {len(rotated)} numbers for {layers} layers"
        )
    unrotated = found["unrotated_layers"] = tuple(i for i in range(layers) if not rotated[i])
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        kinds = read_layers(values, layers)
        windowed = [i for i, kind in enumerate(kinds or ()) if kind == LOCAL]
        if kinds is not None and windowed not in ([], list(unrotated)):
            raise PretrainedError(
                f"config.json: layers {windowed} have a sliding window; only that of the layers "
                f"without a rotation, {list(unrotated)}, is supported"
            )
        if windowed or not kinds:
            found |= read_fields(values, [Field("sliding_window", "unrotated_window")])
    return Config(**found)


def write_config(config: Config) -> dict[str, Any]:
    window, unrotated = config.unrotated_window, config.is_unrotated
    return {
        **write_sizes("smollm3", config, FIELDS),
        "no_rope_layers": [int(not each) for each in unrotated],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [LOCAL if window is not None and each else GLOBAL for each in unrotated],
    }


def table(config: Config) -> MappingTable:
    return decoder_table(config, NORMS_BEFORE, [*ATTENTION, *GATED])
