"""The engine: training and evaluation steps, checkpoints, parity check, NaN diagnosis, logs."""

from jaxspeed.engine.check_report import CheckReport
from jaxspeed.engine.diagnose import Diagnosis
from jaxspeed.engine.engine import Engine, compiled_report
from jaxspeed.engine.jax_setup import simulate

__all__ = [
    "CheckReport",
    "Diagnosis",
    "Engine",
    "compiled_report",
    "simulate",
]
