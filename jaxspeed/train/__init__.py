"""State and the step: what one optimizer step is, as one compiled program."""

from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.train.rng import linen_rngs, micro_batch_key
from jaxspeed.train.state import TrainState

__all__ = ["Program", "TrainState", "build_program", "linen_rngs", "micro_batch_key"]
