"""Steps of an 8 B Llama on preferences, for devices that are not here."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxspeed.config import load_config
from jaxspeed.data import known_shapes
from jaxspeed.data.model_limits import limits_of_run
from jaxspeed.objectives import objective_of
from jaxspeed.parameter_server import build
from jaxspeed.train.phases import BATCH
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import resolve_model
from tests.system.measured import measure

TOKENS, VOCABULARY = 6144, 128256  # TOKENS is no other size of an 8 B Llama


def step(devices: Sequence[jax.Device], objective: str) -> dict[str, Any]:
    return measure(*program(devices, objective))


def program(devices: Sequence[jax.Device] | None, objective: str) -> tuple[Program, Any]:
    """A step of one row of TOKENS a device, and the shapes of its batch."""
    sides = 1 if objective == "next_token" else 2
    config = load_config(
        {
            "model": {"family": "llama", "preset": "llama3-8b"},
            "objective": {"type": objective},
            "data": {"source": "synthetic", "seq_len": TOKENS // sides},
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
            "parallel": {"remat": "full"},
        }
    )
    model, loss_fn = resolve_model(config)
    built = build(config, model, loss_fn, devices=devices)
    reads = limits_of_run(config, None, objective_of(loss_fn))
    shapes = known_shapes(config.data, reads, built.batch.train)
    return built, built.values(shapes)[BATCH]
