"""jaxspeed: any Flax model, one placement table, one compiled step."""

from jaxspeed.config import Config, explain_config
from jaxspeed.engine import CheckReport, Diagnosis, Engine, initialize, simulate
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
from jaxspeed.placement import Placement, PlacementTable
from jaxspeed.placement.units import unit
from jaxspeed.planning import plan
from jaxspeed.train import TrainState, micro_batch_key, propose_tensor_cuts
from jaxspeed.train.model import LayerSpec, PipelineModule, TiedLayerSpec

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
    "simulate",
    "unit",
]
