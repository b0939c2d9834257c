"""Runs: from a config to a trained model; step loop, run folder, evaluation, sampling, output."""

from jaxspeed.run.closing import show_ending
from jaxspeed.run.commands import chat_run, check_run, evaluate_run, sample_run, train
from jaxspeed.run.opening import show_opening
from jaxspeed.run.sampling import FinalSample
from jaxspeed.run.start import RaySource, Source, open_run, source_of
from jaxspeed.run.trainer import Trainer

__all__ = [
    "FinalSample",
    "RaySource",
    "Source",
    "Trainer",
    "chat_run",
    "check_run",
    "evaluate_run",
    "open_run",
    "sample_run",
    "show_ending",
    "show_opening",
    "source_of",
    "train",
]
