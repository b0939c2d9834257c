"""One optimizer step as one compiled program: gradients, accumulation, update, state."""

from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.train.tensor_names import propose_tensor_sharding

__all__ = [
    "Program",
    "build_program",
    "propose_tensor_sharding",
]
