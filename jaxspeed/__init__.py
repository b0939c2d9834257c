"""jaxspeed: DeepSpeed's config and ZeRO, tensor and pipeline parallelism for any Flax model.

A name or a folder is imported when it is first used: the command line shows help and errors in a
config without an import of JAX.
"""

from typing import TYPE_CHECKING

from jaxspeed.lazy_names import lazy_names

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
        PretrainedError,
        RunError,
    )
    from jaxspeed.initialization import initialize
    from jaxspeed.jaxpr.module_scopes import unit
    from jaxspeed.launch.environment import start_processes
    from jaxspeed.objectives import Objective
    from jaxspeed.placement import Placement, PlacementTable
    from jaxspeed.planner.api import plan
    from jaxspeed.train import propose_tensor_sharding
    from jaxspeed.train_state.state import TrainState
    from jaxspeed.user_models import LayerSpec, PipelineModule, TiedLayerSpec
    from jaxspeed.user_models.rng import micro_batch_key

_NAMES = {
    "config": ("Config", "explain_config"),
    "engine": ("CheckReport", "Diagnosis", "Engine", "simulate"),
    "errors": (
        *("BatchError", "CheckpointError", "ConfigError", "DataError", "JaxspeedError"),
        *("ModelError", "OutOfMemoryError", "PlacementError", "PretrainedError", "RunError"),
    ),
    "initialization": ("initialize",),
    "jaxpr.module_scopes": ("unit",),
    "launch.environment": ("start_processes",),
    "objectives": ("Objective",),
    "user_models": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "user_models.rng": ("micro_batch_key",),
    "train_state.state": ("TrainState",),
    "placement": ("Placement", "PlacementTable"),
    "planner.api": ("plan",),
    "train": ("propose_tensor_sharding",),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

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
    "Objective",
    "OutOfMemoryError",
    "PipelineModule",
    "Placement",
    "PlacementError",
    "PlacementTable",
    "PretrainedError",
    "RunError",
    "TiedLayerSpec",
    "TrainState",
    "explain_config",
    "initialize",
    "micro_batch_key",
    "plan",
    "propose_tensor_sharding",
    "simulate",
    "start_processes",
    "unit",
]
