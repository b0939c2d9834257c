"""States on disk: saved beside the training, restored onto any mesh, stage and precision."""

from jaxspeed.checkpoint.catalog import CheckpointInfo, show, verify
from jaxspeed.checkpoint.checkpointer import Checkpointer, Restored

__all__ = ["CheckpointInfo", "Checkpointer", "Restored", "show", "verify"]
