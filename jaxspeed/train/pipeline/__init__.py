"""The micro-batches of a step through a pipeline of stages, tick by tick as a schedule says.

`split` cuts the loss into parts, `outer` runs embedding, head and loss, `stage` the blocks;
`training` and `evaluation` follow the table of ticks.
"""

from jaxspeed.train.pipeline.pipeline import Pipeline, micro_batches
from jaxspeed.train.pipeline.training import Sums

__all__ = ["Pipeline", "Sums", "micro_batches"]
