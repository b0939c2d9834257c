"""Checkpoints: saved in the background, restored onto any mesh, ZeRO stage and precision."""

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
