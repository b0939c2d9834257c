"""The engine: training and evaluation steps, checkpoints, parity check, NaN diagnosis, logs."""

from jaxspeed.engine.check_report import CheckReport
from jaxspeed.engine.diagnose import Diagnosis
from jaxspeed.engine.engine import Engine
from jaxspeed.engine.jax_setup import simulate
from jaxspeed.engine.step_report import compiled_report

__all__ = [
    "CheckReport",
    "Diagnosis",
    "Engine",
    "compiled_report",
    "simulate",
]
