"""Steps of an 8 B Llama by optimizers of matrices, for devices that are not here."""

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

# Rows, columns and number of the matrices of a layer; 32 layers.
MATRICES = ((4096, 4096, 2), (4096, 1024, 2), (4096, 14336, 3))
LAYERS = 32


def step(devices: Sequence[jax.Device], optimizer: str, **more: Any) -> dict[str, Any]:
    return measure(*program(devices, optimizer, **more))


def program(
    devices: Sequence[jax.Device] | None, optimizer: str, micro: int = 2, tensor: int = 1
) -> tuple[Program, Any]:
    """A step of `micro` rows of 4,096 tokens a data rank, and the shapes of its batch."""
    config = load_config(
        {
            "model": {"family": "llama", "preset": "llama3-8b"},
            "data": {"source": "synthetic", "seq_len": 4096},
            "mesh": {"tensor": tensor},
            "train_micro_batch_size_per_gpu": micro,
            "bf16": {"enabled": True},
            "optimizer": {"type": optimizer, "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
        }
    )
    model, loss_fn = resolve_model(config)
    built = build(config, model, loss_fn, devices=devices)
    reads = limits_of_run(config, None, objective_of(loss_fn))
    shapes = known_shapes(config.data, reads, built.batch.train)
    return built, built.values(shapes)[BATCH]
