"""Checkpoints: saved in the background, restored onto any mesh, ZeRO stage and precision."""

from jaxspeed.checkpoint.catalog import CheckpointInfo, show, verify
from jaxspeed.checkpoint.checkpointer import Checkpointer, Restored

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "Restored",
    "show",
    "verify",
]
