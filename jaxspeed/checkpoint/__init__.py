"""States on disk: saved beside the training, restored onto any mesh, stage and precision."""

from jaxspeed.checkpoint.catalog import CheckpointInfo, show, verify
from jaxspeed.checkpoint.checkpointer import Checkpointer, Restored
from jaxspeed.checkpoint.exporting import ExportSummary, export

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "ExportSummary",
    "Restored",
    "export",
    "show",
    "verify",
]
