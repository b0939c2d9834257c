"""State and the step: what one optimizer step is, as one compiled program."""

from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.train.rng import linen_rngs, micro_batch_key
from jaxspeed.train.state import TrainState
from jaxspeed.train.tensor_cuts import propose_tensor_cuts

__all__ = [
    "Program",
    "TrainState",
    "build_program",
    "linen_rngs",
    "micro_batch_key",
    "propose_tensor_cuts",
]
