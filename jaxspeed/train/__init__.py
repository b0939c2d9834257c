"""State and the step: what one optimizer step is, as one compiled program."""

from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.train.tensor_names import propose_tensor_cuts

__all__ = [
    "Program",
    "build_program",
    "propose_tensor_cuts",
]
