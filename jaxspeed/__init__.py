"""jaxspeed: DeepSpeed's config and ZeRO, tensor and pipeline parallelism for any Flax model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspeed.config import Config, explain_config
    from jaxspeed.engine import CheckReport, Diagnosis, Engine, simulate
    from jaxspeed.errors import (
        BatchError,
        CheckpointError,
        ConfigError,
        DataError,
        JaxspeedError,
        ModelError,
        OutOfMemoryError,
        PlacementError,
        RunError,
    )
    from jaxspeed.initialization import initialize
    from jaxspeed.jaxpr.module_scopes import unit
    from jaxspeed.launch.environment import start_processes
    from jaxspeed.objective import LayerSpec, PipelineModule, TiedLayerSpec
    from jaxspeed.objective.rng import micro_batch_key
    from jaxspeed.objective.train_state import TrainState
    from jaxspeed.placement import Placement, PlacementTable
    from jaxspeed.planner.api import plan
    from jaxspeed.train import propose_tensor_cuts, propose_tensor_sharding

__all__ = [
    "BatchError",
    "CheckReport",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Diagnosis",
    "Engine",
    "JaxspeedError",
    "LayerSpec",
    "ModelError",
    "OutOfMemoryError",
    "PipelineModule",
    "Placement",
    "PlacementError",
    "PlacementTable",
    "RunError",
    "TiedLayerSpec",
    "TrainState",
    "explain_config",
    "initialize",
    "micro_batch_key",
    "plan",
    "propose_tensor_cuts",
    "propose_tensor_sharding",
    "simulate",
    "start_processes",
    "unit",
]

# Imported at their first use: JAX takes seconds, and `jaxspeed launch` does without it.
_MODULES = {
    "jaxspeed.config": ("Config", "explain_config"),
    "jaxspeed.engine": ("CheckReport", "Diagnosis", "Engine", "simulate"),
    "jaxspeed.errors": (
        "BatchError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "JaxspeedError",
        "ModelError",
        "OutOfMemoryError",
        "PlacementError",
        "RunError",
    ),
    "jaxspeed.initialization": ("initialize",),
    "jaxspeed.jaxpr.module_scopes": ("unit",),
    "jaxspeed.launch.environment": ("start_processes",),
    "jaxspeed.objective": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "jaxspeed.objective.rng": ("micro_batch_key",),
    "jaxspeed.objective.train_state": ("TrainState",),
    "jaxspeed.placement": ("Placement", "PlacementTable"),
    "jaxspeed.planner.api": ("plan",),
    "jaxspeed.train": ("propose_tensor_cuts", "propose_tensor_sharding"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    try:
        return importlib.import_module(f"jaxspeed.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jaxspeed.{name}":
            raise
    raise AttributeError(f"module 'jaxspeed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
