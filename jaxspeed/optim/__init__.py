"""Optimizers, learning-rate schedules, loss scale and clipping, by DeepSpeed's names and formulas.

Pure functions and Optax transformations on any pytree, independent of meshes. Leaves are identified
by their paths.
"""

from jaxspeed.optim import ema, loss_scale
from jaxspeed.optim.clipping import clip_by_norm, clip_factor, global_norm
from jaxspeed.optim.groups import PathGroup, PathRules
from jaxspeed.optim.loss_scale import LossScale
from jaxspeed.optim.muon import uses_muon
from jaxspeed.optim.norms_and_biases import is_norm_or_bias
from jaxspeed.optim.optimizers import base_learning_rates, build_optimizer
from jaxspeed.optim.owners import ByMatrix, by_owners
from jaxspeed.optim.schedules import LRSchedule, build_schedule
from jaxspeed.placement.linear_layers import matrices_of

__all__ = [
    "ByMatrix",
    "LRSchedule",
    "LossScale",
    "PathGroup",
    "PathRules",
    "base_learning_rates",
    "build_optimizer",
    "build_schedule",
    "by_owners",
    "clip_by_norm",
    "clip_factor",
    "ema",
    "global_norm",
    "is_norm_or_bias",
    "loss_scale",
    "matrices_of",
    "uses_muon",
]
