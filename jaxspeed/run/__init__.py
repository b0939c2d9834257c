"""One run from a config to a trained model: its loop, what it keeps and what it shows."""

from jaxspeed.run.ending import show_ending
from jaxspeed.run.on_ray import RaySource
from jaxspeed.run.opening import show_opening
from jaxspeed.run.plan import Plan
from jaxspeed.run.planned import plan_run
from jaxspeed.run.start import Source, open_run, source_of
from jaxspeed.run.trainer import Trainer
from jaxspeed.run.whole import check_run, evaluate_run, sample_run, train

__all__ = [
    "Plan",
    "RaySource",
    "Source",
    "Trainer",
    "check_run",
    "evaluate_run",
    "open_run",
    "plan_run",
    "sample_run",
    "show_ending",
    "show_opening",
    "source_of",
    "train",
]
