"""Tensor parallelism: what a traced program says of its dims, and where it must communicate.

A parameter's row says which of its dims is cut over `tensor`. From there dims are followed through
the traced program (`follow`, by the rules of `primitives`, into `classes`); where an activation
enters or leaves the cut (`crossings`) a collective is due, and is written into the program
(`write`, `sides`, `moves`), or is broken into the steps of a
ring beside the product that it feeds (`ring`).
"""

from jaxspeed.parallel.tensor.crossings import dims_cut_over
from jaxspeed.parallel.tensor.sides import AS_WHOLE, Style
from jaxspeed.parallel.tensor.write import with_crossings

__all__ = ["AS_WHOLE", "Style", "dims_cut_over", "with_crossings"]
