"""Optimizers, schedules, loss scale, clipping: what happens to gradients once they are reduced.

Pure functions and Optax transformations on pytrees of any kind, in DeepSpeed's words and formulas.
A leaf is known by its path; nothing here knows of meshes.
"""

from jaxspeed.optim import ema, loss_scale
from jaxspeed.optim.clipping import clip_by_norm, clip_factor, global_norm
from jaxspeed.optim.groups import Group, PathRules
from jaxspeed.optim.loss_scale import LossScale
from jaxspeed.optim.muon import uses_muon
from jaxspeed.optim.norms_and_biases import is_norm_or_bias
from jaxspeed.optim.optimizers import base_learning_rates, build_optimizer
from jaxspeed.optim.schedules import Schedule, build_schedule

__all__ = [
    "Group",
    "LossScale",
    "PathRules",
    "Schedule",
    "base_learning_rates",
    "build_optimizer",
    "build_schedule",
    "clip_by_norm",
    "clip_factor",
    "ema",
    "global_norm",
    "is_norm_or_bias",
    "loss_scale",
    "uses_muon",
]
