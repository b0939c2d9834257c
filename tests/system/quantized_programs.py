"""Steps of a quantized Llama under ZeRO 3, compiled for devices that are not here."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxspeed.models import llama

from jaxspeed.config import load_config
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from tests.system.measured import measure

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 640,
}
SEQ = 64


# Enough layers that the codes are larger than what one layer and cuBLAS need.
DEEP = {**SIZES, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 64}


def step(devices: Sequence[jax.Device], weights: str, preset: str | None = None) -> dict[str, Any]:
    """What a step of norms on a quantized base compiles to; of 8 B parameters by its preset."""
    return measure(*program(devices, weights, preset))


def program(
    devices: Sequence[jax.Device] | None, weights: str, preset: str | None = None
) -> tuple[Program, Any]:
    sizes = llama.PRESETS[preset] if preset else llama.Config(**SIZES)
    return program_of(devices, weights, sizes, 512 if preset else SEQ)


def deep(devices: Sequence[jax.Device] | None) -> tuple[Program, Any]:
    """A step of a deep one in nf4."""
    return program_of(devices, "nf4", llama.Config(**DEEP), SEQ)


def program_of(
    devices: Sequence[jax.Device] | None, weights: str, sizes: llama.Config, seq: int
) -> tuple[Program, Any]:
    config = load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8192},
            "parallel": {"remat": "full"},
            "trainable": ["norm", "*_norm"],
            "model": {"quantize": {"weights": weights}},
        }
    )
    made = build_program(config, lambda rngs: llama.build(sizes, rngs), llama.loss, devices=devices)
    return made, {"tokens": jax.ShapeDtypeStruct((made.batch.train, seq + 1), jnp.int32)}
