"""jaxspeed: DeepSpeed's config and ZeRO, tensor and pipeline parallelism for any Flax model."""

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
    "PretrainedError",
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
    "unit",
]
